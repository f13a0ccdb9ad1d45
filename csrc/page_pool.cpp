#include "page_pool.h"

#include <algorithm>
#include <stdexcept>

namespace vattn {

PagePool::PagePool(std::size_t page_size, std::size_t budget, bool zero_on_free)
    : page_size_(page_size), budget_(budget), zero_on_free_(zero_on_free), limit_(budget) {
  if (budget > kForeign) throw std::invalid_argument("more pages than a page index can name");
}

PoolCounts PagePool::counts() const { return {budget_, released_.size() + (budget_ - fresh_), free_.size(), taken_}; }

PageId PagePool::take_one(const PageId* after, std::vector<PageId>* created) {
  PageId page;
  if (!free_.empty()) {
    auto it = after ? free_.find(*after + 1) : free_.end();
    if (it == free_.end()) it = free_.begin();
    page = *it;
    free_.erase(it);
  } else {
    if (!released_.empty()) {
      auto it = after ? released_.find(*after + 1) : released_.end();
      if (it == released_.end()) it = released_.begin();
      page = *it;
      released_.erase(it);
    } else {
      page = fresh_;
      handles_.reach(page);
      references_.push_back(0);
      fresh_ += 1;
    }
    created->push_back(page);
  }
  references_[page] = 1;
  taken_ += 1;
  return page;
}

std::vector<PageId> PagePool::take(std::size_t count, const PageId* after, std::vector<PageId>* created) {
  const PoolCounts now = counts();
  if (count > now.free + now.absent) throw std::logic_error("took more pages than the pool has");
  std::vector<PageId> pages;
  pages.reserve(count);
  while (pages.size() < count) pages.push_back(take_one(pages.empty() ? after : &pages.back(), created));
  return pages;
}

void PagePool::retain(PageId page) {
  if (foreign(page)) {
    foreign_.at(page - kForeign) += 1;
    return;
  }
  if (references(page) == 0) throw std::logic_error("retained a page that nobody holds");
  references_[page] += 1;
}

bool PagePool::drop(PageId page) {
  if (references(page) == 0) throw std::logic_error("dropped a page that nobody holds");
  if (foreign(page)) {
    foreign_[page - kForeign] -= 1;
    return false;
  }
  if (--references_[page] > 0) return false;
  free_.insert(page);
  taken_ -= 1;
  return true;
}

std::vector<PageId> PagePool::remove_free(std::size_t count) {
  std::vector<PageId> pages;
  while (pages.size() < count && !free_.empty()) {
    const PageId page = *free_.rbegin();
    free_.erase(page);
    released_.insert(page);
    pages.push_back(page);
  }
  return pages;
}

void PagePool::undo_take(const std::vector<PageId>& pages, const std::vector<PageId>& created) {
  for (const PageId page : pages) drop(page);
  for (const PageId page : created) {
    free_.erase(page);
    released_.insert(page);
  }
}

void PagePool::undo_drop(PageId page) {
  if (foreign(page)) return retain(page);
  if (page >= fresh_) throw std::logic_error("undid the drop of a page that nobody ever held");
  if (references_[page]++ == 0) {
    free_.erase(page);
    taken_ += 1;
  }
}

void PagePool::undo_remove_free(const std::vector<PageId>& pages) {
  for (const PageId page : pages) {
    released_.erase(page);
    free_.insert(page);
  }
}

std::vector<PageId> PagePool::add_foreign(Handle first, std::size_t count) {
  const std::size_t fresh = count - std::min(count, foreign_removed_.size());
  if (fresh > kForeign - foreign_.size()) throw std::logic_error("more foreign pages than a page index can name");
  // What can fail comes first.
  std::vector<PageId> pages(count);
  PageId next = static_cast<PageId>(foreign_.size());
  if (fresh) foreign_handles_.reach(next + static_cast<PageId>(fresh) - 1);
  const std::size_t all = foreign_.size() + fresh;
  if (foreign_removed_.capacity() < all) foreign_removed_.reserve(2 * all);  // so that `remove_foreign` cannot fail
  foreign_.resize(all);
  for (std::size_t i = 0; i < count; ++i) {
    PageId index = next;
    if (foreign_removed_.empty()) {
      next += 1;
    } else {
      index = foreign_removed_.back();
      foreign_removed_.pop_back();
    }
    foreign_handles_.at(index) = first + i;
    pages[i] = kForeign + index;
  }
  return pages;
}

Handle PagePool::remove_foreign(PageId page) {
  if (!foreign(page) || foreign_.at(page - kForeign)) throw std::logic_error("removed a page that somebody holds");
  foreign_removed_.push_back(page - kForeign);
  return foreign_handles_.at(page - kForeign);
}

void PagePool::check() const {
  std::size_t taken = 0;
  for (PageId page = 0; page < fresh_; ++page) {
    const bool held = references_[page] > 0;
    const bool is_free = free_.contains(page);
    const bool is_absent = released_.contains(page);
    if (held + is_free + is_absent != 1) throw std::logic_error("a page is not in exactly one of absent, free, taken");
    taken += held;
  }
  const PoolCounts c = counts();
  if (taken != c.taken || c.absent + c.free + c.taken != c.budget)
    throw std::logic_error("absent + free + taken is not the budget");
}

}  // namespace vattn
