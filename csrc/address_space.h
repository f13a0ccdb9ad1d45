// The virtual tensors of one kind: equal reservations that grow and shrink together, and the books of what is mapped
// where.
//
// A reservation is divided into slots, a slot into runs, a run into pages:
//   address of page p = base[tensor] + ((slot * runs + run) * run_pages + p) * page_size.
// A lane is one run of one tensor. A column is the pages of one index in all lanes of a slot: they back the same
// tokens, and are mapped and unmapped together.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "driver.h"
#include "fork_guard.h"
#include "mapper.h"
#include "page_pool.h"

namespace vattn {

// The pages of neighbouring columns, by column, then lane: a list, which holds no reference.
struct Pages {
  std::size_t lanes;
  std::vector<PageId> ids;

  std::size_t columns() const { return ids.size() / lanes; }
  // Columns [from, to) of these. Throws std::logic_error where there are not so many.
  Pages part(std::size_t from, std::size_t to) const;
};

class AddressSpace : public std::enable_shared_from_this<AddressSpace> {
 public:
  struct Shape {
    std::size_t tensors;
    std::size_t slots;
    std::size_t runs;
    std::size_t run_pages;
    bool zeroed = false;  // pages are zero when they are mapped by grow, whatever memory they are
  };

  // Reserves `tensors` address ranges of slots * runs * run_pages pages. Throws DriverFailure; nothing stays reserved
  // then.
  AddressSpace(std::shared_ptr<Driver> driver, std::shared_ptr<PagePool> pool, const Shape& shape);
  // Gives the addresses back. Whatever is mapped is unmapped first, whether the books know of it or not, so nothing of
  // it may be in the mapper's log. If a graph is being captured, so that kernels that read it cannot be waited for, or
  // a call fails, it stays until the next space is made or goes after that; for good, if waiting fails otherwise.
  ~AddressSpace();
  AddressSpace(const AddressSpace&) = delete;
  AddressSpace& operator=(const AddressSpace&) = delete;

  const Shape& shape() const { return shape_; }
  std::size_t lanes() const { return shape_.tensors * shape_.runs; }
  std::size_t tensor_bytes() const { return shape_.slots * shape_.runs * shape_.run_pages * pool_->page_size(); }
  Address base(std::size_t tensor) const { return bases_.at(tensor); }
  // Columns [first(slot), columns(slot)) of the slot are mapped.
  std::size_t first(std::size_t slot) const { return slots_.at(slot).first; }
  std::size_t columns(std::size_t slot) const { return slots_.at(slot).first + slots_.at(slot).columns.size(); }

  // These change the books and add to the transaction what the worker has to do. The caller has checked that the pool
  // and the slot have room; std::logic_error otherwise.
  // `tag` marks the new columns.
  void grow(Transaction& transaction, std::size_t slot, std::size_t count, std::uint64_t tag = 0);
  void shrink(Transaction& transaction, std::size_t slot, std::size_t count);  // takes the last columns
  void retire(Transaction& transaction, std::size_t slot, std::size_t count);  // takes the first columns
  // Where the next column of a slot without any is to be.
  void place(Transaction& transaction, std::size_t slot, std::size_t column);
  // Appends pages that somebody holds, as one range of columns.
  void attach(Transaction& transaction, std::size_t slot, const Pages& pages, Access access);

  // Whether a column of the slot from `from` on was grown with a smaller tag.
  bool has_older(std::size_t slot, std::size_t from, std::uint64_t tag) const;

  // The pages of columns [from, to) of the slot.
  Pages pages(std::size_t slot, std::size_t from, std::size_t to) const;

  // Adds the slots that have a page, and those that may write to it.
  struct Users {
    std::uint32_t holders = 0, writers = 0;
  };
  void count(std::unordered_map<PageId, Users>& users) const;

  // With the log run dry: asks the provider whether exactly the pages in the books are mapped, with their access.
  // Throws std::logic_error.
  void check() const;

 private:
  struct Column {
    std::vector<PageId> pages;  // one per lane
    Access access;
    std::uint64_t tag;
  };
  struct Slot {
    std::size_t first = 0;
    std::vector<Column> columns;   // from the first on
    std::size_t most_columns = 0;  // end of the last one, ever: no page beyond was touched
  };

  Address address(std::size_t lane, std::size_t slot, std::size_t page) const;
  void push(Transaction& transaction, std::size_t slot, std::vector<Column> columns);
  // Takes away columns [from, to), at either end of the slot.
  void remove(Transaction& transaction, std::size_t slot, std::size_t from, std::size_t to);
  // One operation per lane and stretch of equal access over columns [from, to) of the slot.
  void add_operations(Transaction& transaction, Operation::Kind kind, std::size_t slot, std::size_t from,
                      std::size_t to) const;

  const std::shared_ptr<Driver> driver_;
  const std::shared_ptr<PagePool> pool_;
  const Shape shape_;
  const ForkGuard fork_;
  std::vector<Address> bases_;
  std::vector<Slot> slots_;
};

// Every page that these spaces or `held` have has as many references as slots and entries of `held` have it, and at
// most one of the slots may write to it. Throws std::logic_error. Nobody else may have one of those pages.
void check_references(const PagePool& pool, const std::vector<std::shared_ptr<AddressSpace>>& spaces,
                      const std::vector<const Pages*>& held);

}  // namespace vattn
