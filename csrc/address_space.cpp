#include "address_space.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "left_behind.h"

namespace vattn {

AddressSpace::AddressSpace(std::shared_ptr<Driver> driver, std::shared_ptr<PagePool> pool, const Shape& shape)
    : driver_(std::move(driver)), pool_(std::move(pool)), shape_(shape), slots_(shape.slots) {
  give_back_left_behind();
  const Driver::Scope scope(*driver_);
  // Pages are multiples of the granularity, which is a power of two; an alignment has to be one.
  const std::size_t alignment = pool_->page_size() & (~pool_->page_size() + 1);
  for (std::size_t tensor = 0; tensor < shape_.tensors; ++tensor) {
    Address base = 0;
    const Result result = driver_->reserve(&base, tensor_bytes(), alignment);
    if (result != kSuccess) {
      Remains remains{driver_, pool_->page_size(), tensor_bytes(), bases_};
      if (!remains.give_back()) leave_behind(std::move(remains));
      throw driver_->failure(Call::kReserve, result);
    }
    bases_.push_back(base);
  }
}

AddressSpace::~AddressSpace() {
  if (fork_.forked() || exiting()) return;
  give_back_left_behind();
  Remains remains{driver_, pool_->page_size(), tensor_bytes(), bases_};
  const Driver::Scope scope(*driver_);
  Handle handle = 0;
  Access access = Access::kNone;
  for (std::size_t slot = 0; slot < shape_.slots; ++slot)
    for (std::size_t lane = 0; lane < lanes(); ++lane)
      for (std::size_t page = 0; page < slots_[slot].most_columns; ++page)
        if (const Address at = address(lane, slot, page); driver_->mapped(at, &handle, &access))
          remains.mapped.push_back(at);
  if (!remains.give_back()) leave_behind(std::move(remains));
}

Address AddressSpace::address(std::size_t lane, std::size_t slot, std::size_t page) const {
  const std::size_t tensor = lane / shape_.runs;
  const std::size_t run = slot * shape_.runs + lane % shape_.runs;
  return bases_[tensor] + (run * shape_.run_pages + page) * pool_->page_size();
}

void AddressSpace::add_operations(Transaction& transaction, Operation::Kind kind, std::size_t slot, std::size_t from,
                                  std::size_t to) const {
  const std::size_t first = slots_[slot].first;
  const auto column = [&](std::size_t index) -> const Column& { return slots_[slot].columns[index - first]; };
  while (from < to) {
    std::size_t end = from + 1;
    while (end < to && column(end).access == column(from).access) ++end;
    for (std::size_t lane = 0; lane < lanes(); ++lane) {
      Operation operation{kind, {}, address(lane, slot, from), column(from).access};
      operation.pages.reserve(end - from);
      for (std::size_t i = from; i < end; ++i) operation.pages.push_back(column(i).pages[lane]);
      transaction.add(std::move(operation));
    }
    from = end;
  }
}

Pages Pages::part(std::size_t from, std::size_t to) const {
  if (from > to || to > columns()) throw std::logic_error("asked for columns that the pages do not have");
  const auto at = [&](std::size_t column) { return ids.begin() + static_cast<std::ptrdiff_t>(column * lanes); };
  return {lanes, {at(from), at(to)}};
}

void AddressSpace::push(Transaction& transaction, std::size_t slot, std::vector<Column> columns) {
  Slot& mapped = slots_.at(slot);
  const std::size_t before = mapped.columns.size();
  const std::size_t from = this->columns(slot);
  for (Column& column : columns) mapped.columns.push_back(std::move(column));
  mapped.most_columns = std::max(mapped.most_columns, this->columns(slot));
  add_operations(transaction, Operation::Kind::kMap, slot, from, this->columns(slot));
  transaction.on_revert([self = shared_from_this(), slot, before] { self->slots_[slot].columns.resize(before); });
}

void AddressSpace::grow(Transaction& transaction, std::size_t slot, std::size_t count, std::uint64_t tag) {
  const std::vector<Column>& mapped = slots_.at(slot).columns;
  const PoolCounts counts = pool_->counts();
  if (this->columns(slot) + count > shape_.run_pages) throw std::logic_error("grew a slot past its end");
  if (lanes() * count > counts.free + counts.absent) throw std::logic_error("grew a slot past the pool's budget");
  std::vector<Column> columns(count, Column{std::vector<PageId>(lanes()), Access::kReadWrite, tag});
  std::vector<PageId> taken, created;
  for (std::size_t lane = 0; lane < lanes(); ++lane) {
    const PageId* after = mapped.empty() ? nullptr : &mapped.back().pages[lane];
    const std::vector<PageId> pages = pool_->take(count, after, &created);
    for (std::size_t i = 0; i < count; ++i) columns[i].pages[lane] = pages[i];
    taken.insert(taken.end(), pages.begin(), pages.end());
  }
  if (!created.empty()) transaction.add({Operation::Kind::kCreate, created});
  if (shape_.zeroed) transaction.add({Operation::Kind::kZero, taken});
  transaction.on_revert(
      [pool = pool_, taken = std::move(taken), created = std::move(created)] { pool->undo_take(taken, created); });
  push(transaction, slot, std::move(columns));
}

void AddressSpace::attach(Transaction& transaction, std::size_t slot, const Pages& pages, Access access) {
  if (!pages.ids.empty() && pages.lanes != lanes()) throw std::logic_error("attached columns of another shape");
  const std::size_t count = pages.ids.size() / lanes();
  if (this->columns(slot) + count > shape_.run_pages) throw std::logic_error("attached past a slot's end");
  std::vector<Column> columns;
  columns.reserve(count);
  const auto width = static_cast<std::ptrdiff_t>(lanes());
  for (auto page = pages.ids.begin(); page != pages.ids.end(); page += width)
    columns.push_back({{page, page + width}, access, 0});
  for (const PageId page : pages.ids) pool_->retain(page);
  transaction.on_revert([pool = pool_, pages] {
    for (const PageId page : pages.ids) pool->drop(page);
  });
  push(transaction, slot, std::move(columns));
}

void AddressSpace::shrink(Transaction& transaction, std::size_t slot, std::size_t count) {
  if (count > slots_.at(slot).columns.size()) throw std::logic_error("shrank a slot below nothing");
  remove(transaction, slot, columns(slot) - count, columns(slot));
}

void AddressSpace::retire(Transaction& transaction, std::size_t slot, std::size_t count) {
  if (count > slots_.at(slot).columns.size()) throw std::logic_error("retired more columns than a slot has");
  remove(transaction, slot, first(slot), first(slot) + count);
  slots_[slot].first += count;
  transaction.on_revert([self = shared_from_this(), slot, count] { self->slots_[slot].first -= count; });
}

void AddressSpace::place(Transaction& transaction, std::size_t slot, std::size_t column) {
  if (!slots_.at(slot).columns.empty()) throw std::logic_error("placed a slot that has columns");
  if (column > shape_.run_pages) throw std::logic_error("placed a slot past its end");
  transaction.on_revert([self = shared_from_this(), slot, before = first(slot)] { self->slots_[slot].first = before; });
  slots_[slot].first = column;
}

void AddressSpace::remove(Transaction& transaction, std::size_t slot, std::size_t from, std::size_t to) {
  add_operations(transaction, Operation::Kind::kUnmap, slot, from, to);
  std::vector<Column>& mapped = slots_[slot].columns;
  const auto at = static_cast<std::ptrdiff_t>(from - first(slot));
  const auto begin = mapped.begin() + at, end = begin + static_cast<std::ptrdiff_t>(to - from);
  std::vector<Column> removed(std::make_move_iterator(begin), std::make_move_iterator(end));
  mapped.erase(begin, end);
  for (const Column& column : removed) transaction.drop(*pool_, column.pages);
  transaction.on_revert([self = shared_from_this(), slot, at, removed = std::move(removed)] {
    for (const Column& column : removed)
      for (const PageId page : column.pages) self->pool_->undo_drop(page);
    std::vector<Column>& columns = self->slots_[slot].columns;
    columns.insert(columns.begin() + at, removed.begin(), removed.end());
  });
}

bool AddressSpace::has_older(std::size_t slot, std::size_t from, std::uint64_t tag) const {
  for (std::size_t i = std::max(from, first(slot)); i < columns(slot); ++i)
    if (slots_[slot].columns[i - first(slot)].tag < tag) return true;
  return false;
}

Pages AddressSpace::pages(std::size_t slot, std::size_t from, std::size_t to) const {
  if (from > to || to > columns(slot) || (from < to && from < first(slot)))
    throw std::logic_error("asked for columns that the slot does not have");
  Pages pages{lanes(), {}};
  pages.ids.reserve((to - from) * lanes());
  for (std::size_t i = from; i < to; ++i) {
    const std::vector<PageId>& column = slots_[slot].columns[i - first(slot)].pages;
    pages.ids.insert(pages.ids.end(), column.begin(), column.end());
  }
  return pages;
}

void AddressSpace::count(std::unordered_map<PageId, Users>& users) const {
  for (const Slot& slot : slots_)
    for (const Column& column : slot.columns)
      for (const PageId page : column.pages) {
        users[page].holders += 1;
        users[page].writers += column.access == Access::kReadWrite;
      }
}

void AddressSpace::check() const {
  const Driver::Scope scope(*driver_);
  for (std::size_t slot = 0; slot < shape_.slots; ++slot) {
    const std::size_t begin = first(slot), end = columns(slot);
    for (std::size_t lane = 0; lane < lanes(); ++lane) {
      Handle handle = 0;
      Access access = Access::kNone;
      for (std::size_t page = begin; page < end; ++page) {
        const Column& column = slots_[slot].columns[page - begin];
        if (!driver_->mapped(address(lane, slot, page), &handle, &access))
          throw std::logic_error("a page in the books is not mapped");
        if (handle != pool_->handle(column.pages[lane])) throw std::logic_error("another page is mapped");
        if (access != driver_->granted(column.access)) throw std::logic_error("a page is mapped with another access");
      }
      for (std::size_t page = begin > 2 ? begin - 2 : 0; page < shape_.run_pages && page < end + 2; ++page)
        if ((page < begin || page >= end) && driver_->mapped(address(lane, slot, page), &handle, &access))
          throw std::logic_error("a page past the books is mapped");
    }
  }
}

void check_references(const PagePool& pool, const std::vector<std::shared_ptr<AddressSpace>>& spaces,
                      const std::vector<const Pages*>& held) {
  std::unordered_map<PageId, AddressSpace::Users> users;
  for (const auto& space : spaces) space->count(users);
  for (const Pages* const pages : held)
    for (const PageId page : pages->ids) users[page].holders += 1;
  for (const auto& [page, found] : users) {
    if (found.holders != pool.references(page))
      throw std::logic_error("a page's references are not the slots and entries that have it");
    if (found.writers > 1) throw std::logic_error("a page is writable in two slots");
    if (found.writers && PagePool::foreign(page)) throw std::logic_error("a page of another process is writable");
  }
}

}  // namespace vattn
