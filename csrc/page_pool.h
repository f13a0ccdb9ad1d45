// Physical pages by index, under a budget.
//
// Conservation law: absent + free + taken == budget, where a page is
//   absent  without memory;
//   free    with memory, and nobody's (references == 0);
//   taken   with memory, and held by `references` slots.
// These are the books, kept on the caller's thread as decisions are taken. The handles lag behind them: only the
// mapper's worker reads and writes those, in the order of its log.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <vector>

#include "vmm.h"

namespace vattn {

using PageId = std::uint32_t;

struct PoolCounts {
  std::size_t budget;
  std::size_t absent;
  std::size_t free;
  std::size_t taken;
};

class PagePool {
 public:
  PagePool(std::size_t page_size, std::size_t budget);

  std::size_t page_size() const { return page_size_; }
  PoolCounts counts() const;

  // Takes `count` pages with one reference each, neighbours where it can, the first next to `after` (if not null). Free
  // pages go before absent ones, which are appended to `created`. Throws std::logic_error if counts() does not allow
  // it.
  std::vector<PageId> take(std::size_t count, const PageId* after, std::vector<PageId>* created);
  void retain(PageId page);
  void drop(PageId page);  // the last reference gone, the page is free

  // Turns up to `count` free pages absent.
  std::vector<PageId> remove_free(std::size_t count);

  // Exact inverses, for transactions that are taken back.
  void undo_take(const std::vector<PageId>& pages, const std::vector<PageId>& created);
  void undo_drop(PageId page);
  void undo_remove_free(const std::vector<PageId>& pages);

  std::uint32_t references(PageId page) const { return references_[page]; }
  void check() const;  // throws std::logic_error where the law does not hold

  Handle& handle(PageId page) { return handles_[page]; }  // the worker's

 private:
  PageId take_one(const PageId* after, std::vector<PageId>* created);

  const std::size_t page_size_;
  std::vector<std::uint32_t> references_;
  std::vector<Handle> handles_;
  std::set<PageId> free_;
  std::set<PageId> released_;  // absent pages below fresh_; all from fresh_ on are absent too
  PageId fresh_ = 0;
  std::size_t taken_ = 0;
};

}  // namespace vattn
