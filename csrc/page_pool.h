// Physical pages by index, under a budget.
//
// Conservation law: absent + free + taken == budget, where a page is
//   absent  without memory;
//   free    with memory, and nobody's (references == 0);
//   taken   with memory, and held by `references` slots.
// These are the books, kept on the caller's thread as decisions are taken. The handles lag behind them: only the
// mapper's worker reads and writes those, in the order of its log.
//
// Beside these there are foreign pages, of another process: they have an index, a handle and references, and no part in
// the budget.
#pragma once

#include <array>
#include <atomic>
#include <bit>
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
  // Copied with the pool, which an atomic alone is not.
  struct Limit : std::atomic<std::size_t> {
    explicit Limit(std::size_t pages) : atomic(pages) {}
    Limit(const Limit& other) : atomic(other.load(std::memory_order_relaxed)) {}
  };

 public:
  // `zero_on_free`: a page whose last reference goes is zeroed in the transaction that drops it.
  PagePool(std::size_t page_size, std::size_t budget, bool zero_on_free = false);

  std::size_t page_size() const { return page_size_; }
  std::size_t budget() const { return budget_; }
  // Pages that may have memory now, at most the budget. It is for those who decide what to take, and for the stock; to
  // take more than this is no error. Any thread may set it.
  std::size_t limit() const { return limit_.load(std::memory_order_relaxed); }
  void set_limit(std::size_t pages) { limit_.store(pages, std::memory_order_relaxed); }
  bool zero_on_free() const { return zero_on_free_; }
  PoolCounts counts() const;

  // Takes `count` pages with one reference each, neighbours where it can, the first next to `after` (if not null). Free
  // pages go before absent ones, which are appended to `created`. Throws std::logic_error if counts() does not allow
  // it.
  std::vector<PageId> take(std::size_t count, const PageId* after, std::vector<PageId>* created);
  void retain(PageId page);
  bool drop(PageId page);  // the last reference gone, the page is free: true

  // Turns up to `count` free pages absent.
  std::vector<PageId> remove_free(std::size_t count);

  // Exact inverses, for transactions that are taken back.
  void undo_take(const std::vector<PageId>& pages, const std::vector<PageId>& created);
  void undo_drop(PageId page);
  void undo_remove_free(const std::vector<PageId>& pages);

  // Foreign pages have the indices from kForeign on. Unlike others, one without references can be retained, and stays
  // until it is removed; then no transaction may name it any more. Its handle is the caller's to release.
  static constexpr PageId kForeign = PageId{1} << 31;
  static bool foreign(PageId page) { return page >= kForeign; }
  // Of neighbouring handles, in their order.
  std::vector<PageId> add_foreign(Handle first, std::size_t count);
  Handle remove_foreign(PageId page);

  std::uint32_t references(PageId page) const {
    if (foreign(page)) return page - kForeign < foreign_.size() ? foreign_[page - kForeign] : 0;
    return page < fresh_ ? references_[page] : 0;
  }
  // Pages that were ever taken: all beyond are absent.
  std::size_t used() const { return fresh_; }
  void check() const;  // throws std::logic_error where the law does not hold

  // The worker's, of a page that was taken.
  Handle& handle(PageId page) { return foreign(page) ? foreign_handles_.at(page - kForeign) : handles_.at(page); }

 private:
  PageId take_one(const PageId* after, std::vector<PageId>* created);

  // Books grow with the pages that are used, so a pool costs nothing for its budget. Handles lie in blocks, each as
  // long as all before it: where one is never changes, as the worker uses it while the caller takes further pages.
  class Handles {
   public:
    Handle& at(PageId page) { return blocks_[block_of(page)][page - block_begin(block_of(page))]; }
    void reach(PageId page) {
      // Upwards, so that what there is has all before it, also if memory ends.
      if (blocks_[block_of(page)].empty())
        for (std::size_t number = 0; number <= block_of(page); ++number)
          if (blocks_[number].empty()) blocks_[number].resize(block_begin(number + 1) - block_begin(number));
    }

   private:
    static constexpr int kFirstBlockLog2 = 10;
    static std::size_t block_of(PageId page) {
      return static_cast<std::size_t>(std::bit_width(page >> kFirstBlockLog2));
    }
    static std::size_t block_begin(std::size_t block) {
      return block ? std::size_t{1} << (kFirstBlockLog2 + block - 1) : 0;
    }

    std::array<std::vector<Handle>, 33 - kFirstBlockLog2> blocks_;
  };

  const std::size_t page_size_;
  const std::size_t budget_;
  const bool zero_on_free_;
  Limit limit_;
  std::vector<std::uint32_t> references_;  // of pages below fresh_
  Handles handles_;
  std::set<PageId> free_;
  std::set<PageId> released_;  // absent pages below fresh_; all from fresh_ on are absent too
  PageId fresh_ = 0;
  std::size_t taken_ = 0;
  std::vector<std::uint32_t> foreign_;  // references, by index from kForeign on
  Handles foreign_handles_;
  std::vector<PageId> foreign_removed_;  // indices that may be given again
};

}  // namespace vattn
