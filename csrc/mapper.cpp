#include "mapper.h"

#include <pthread.h>

#include <algorithm>
#include <csignal>
#include <stdexcept>
#include <utility>

#include "left_behind.h"

namespace vattn {

void Transaction::revert() {
  while (!undo_.empty()) {
    undo_.back()();
    undo_.pop_back();
  }
}

void Transaction::drop(PagePool& pool, const std::vector<PageId>& pages) {
  std::vector<PageId> freed;
  for (const PageId page : pages)
    if (pool.drop(page)) freed.push_back(page);
  if (pool.zero_on_free() && !freed.empty()) add({Operation::Kind::kZero, std::move(freed)});
}

namespace {

// Making memory takes a core, and memory's bandwidth, from whoever computes: so the stock is filled in parts of about
// this long, each followed by a rest that leaves a twentieth of the time to it.
constexpr auto kPart = std::chrono::microseconds{500};
constexpr int kRests = 19;

class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

struct Mapper::Worker {
  std::mutex mutex;
  std::condition_variable submitted;
  std::condition_variable finished;
  std::deque<std::shared_ptr<Transaction>> log;
  // Executed transactions, until a caller's thread destroys them: what they hold may need the interpreter's lock, for
  // which the worker must never wait.
  std::vector<std::shared_ptr<Transaction>> executed;
  std::vector<std::shared_ptr<Transaction>> failures;
  // The thread's own: memory to give back, and memory that the transaction under way zeroes.
  std::vector<Handle> released, zeroed;
  std::vector<Window> left_over;  // that could not be closed
  std::deque<Undo> undoing;       // what undoes the failed transaction, in order
  bool mending = false;           // undoing is to go on
  std::deque<Handle> stock;       // oldest first, so that memory created in sequence is used in sequence
  std::size_t wanted = 0;         // in stock
  bool returning = false;         // the stock is to be given back
  bool barren = false;            // a fill failed: none is tried until more is wanted
  bool busy = false;              // between the making of memory, or the end of its use, and the books of it
  std::chrono::steady_clock::time_point rested{};  // no fill before
  bool stopping = false;
  std::thread thread;
};

Mapper::Mapper(std::shared_ptr<Driver> driver, std::shared_ptr<PagePool> pool)
    : driver_(std::move(driver)), pool_(std::move(pool)), worker_(std::make_unique<Worker>()) {
  // Signals are the interpreter's: the worker must not be the thread that they interrupt.
  const SignalsBlocked blocked;
  worker_->thread = std::thread([this] { run(); });
}

Mapper::~Mapper() {
  stop();
  if (fork_.forked()) static_cast<void>(worker_.release());
}

Ticket Mapper::submit(std::shared_ptr<Transaction> transaction) {
  if (fork_.forked()) throw std::logic_error("the worker is not running");
  std::vector<std::shared_ptr<Transaction>> executed;  // destroyed after the lock is gone
  Ticket ticket = 0;
  {
    const std::lock_guard lock(worker_->mutex);
    if (worker_->stopping) throw std::logic_error("the worker is not running");
    worker_->log.push_back(transaction);  // may throw, and a ticket without a transaction would never pass
    ticket = transaction->ticket_ = ++last_;
    executed.swap(worker_->executed);
  }
  worker_->submitted.notify_one();
  return ticket;
}

void Mapper::wait(Ticket ticket) {
  if (passed(ticket)) return;
  if (fork_.forked()) throw std::logic_error("the worker is not running");
  if (ticket > last_) throw std::logic_error("waited for a ticket that was never submitted");
  std::unique_lock lock(worker_->mutex);
  worker_->finished.wait(lock, [&] { return passed(ticket); });
}

std::vector<std::shared_ptr<Transaction>> Mapper::failures() {
  if (fork_.forked()) throw std::logic_error("the worker is not running");
  wait(last_);
  const std::lock_guard lock(worker_->mutex);
  return worker_->failures;
}

void Mapper::resume() {
  if (fork_.forked()) throw std::logic_error("the worker is not running");
  wait(last_);
  std::vector<std::shared_ptr<Transaction>> forgotten;  // destroyed after the lock is gone
  const std::lock_guard lock(worker_->mutex);
  failed_ = false;
  forgotten.swap(worker_->failures);
}

void Mapper::stock(std::size_t pages) {
  if (fork_.forked()) throw std::logic_error("the worker is not running");
  {
    const std::lock_guard lock(worker_->mutex);
    worker_->barren = false;
    worker_->wanted = pages;
    if (!lacks_stock()) return;
  }
  worker_->submitted.notify_one();
}

std::size_t Mapper::stocked() const {
  if (fork_.forked()) throw std::logic_error("the worker is not running");
  const std::lock_guard lock(worker_->mutex);
  return worker_->stock.size();
}

std::size_t Mapper::unstock() {
  if (fork_.forked()) throw std::logic_error("the worker is not running");
  std::unique_lock lock(worker_->mutex);
  const std::size_t before = worker_->stock.size();
  worker_->wanted = 0;
  worker_->returning = true;
  worker_->submitted.notify_one();
  worker_->finished.wait(lock, [&] { return !worker_->returning || worker_->stopping; });
  return before;
}

bool Mapper::mend() {
  if (fork_.forked()) throw std::logic_error("the worker is not running");
  std::unique_lock lock(worker_->mutex);
  worker_->mending = true;
  worker_->submitted.notify_one();
  worker_->finished.wait(lock, [&] { return !worker_->mending || worker_->stopping; });
  return !broken_;
}

void Mapper::stop() {
  if (fork_.forked()) return;
  std::call_once(stop_once_, [this] {
    {
      const std::lock_guard lock(worker_->mutex);
      worker_->stopping = true;
    }
    worker_->submitted.notify_one();
    worker_->thread.join();
  });
}

void Mapper::run() {
  Call call;
  const Result attached = driver_->attach(&call);
  std::unique_lock lock(worker_->mutex);
  worker_->barren = attached != kSuccess;
  const auto called = [&] {
    return worker_->stopping || worker_->returning || worker_->mending || !worker_->log.empty();
  };
  for (;;) {
    worker_->submitted.wait(lock, [&] { return called() || lacks_stock(); });
    if (!called()) {
      if (!worker_->submitted.wait_until(lock, worker_->rested, called)) fill(lock);
      continue;
    }
    if (worker_->mending) {
      lock.unlock();
      undo();
      lock.lock();
      worker_->mending = false;
      worker_->finished.notify_all();
      continue;
    }
    if (worker_->log.empty()) {
      worker_->released.insert(worker_->released.end(), worker_->stock.begin(), worker_->stock.end());
      worker_->stock.clear();
      worker_->busy = true;
      const bool stopping = worker_->stopping;
      lock.unlock();
      tidy(stopping);
      lock.lock();
      worker_->busy = worker_->returning = false;
      worker_->finished.notify_all();
      if (stopping) return;
      continue;
    }
    Transaction& transaction = *worker_->log.front();
    Status status = Status::kCancelled;
    if (!failed_) {
      lock.unlock();
      if (attached == kSuccess) {
        execute(transaction);
      } else {
        transaction.failed_call_ = call;
        transaction.failed_result_ = attached;
      }
      lock.lock();
      status = transaction.failed_result_ == kSuccess ? Status::kDone : Status::kFailed;
    }
    // Before the ticket passes, so that whoever sees it pass sees the failure.
    if (status != Status::kDone) failed_ = true;
    transaction.status_.store(status, std::memory_order_release);
    passed_.store(transaction.ticket_, std::memory_order_release);
    auto& destination = status == Status::kDone ? worker_->executed : worker_->failures;
    destination.push_back(std::move(worker_->log.front()));
    worker_->log.pop_front();
    worker_->finished.notify_all();
  }
}

void Mapper::execute(Transaction& transaction) {
  tidy();
  const auto& operations = transaction.operations_;
  Call* const call = &transaction.failed_call_;
  Result* const result = &transaction.failed_result_;
  std::size_t i = 0, done = 0;
  for (; i < operations.size(); ++i, done = 0)
    if (!perform(operations[i], &done, call, result)) break;
  Window window;
  const bool performed = i == operations.size() && open(window, call, result) && zero(window, call, result);
  if (!close(window)) worker_->left_over.push_back(window);
  if (performed) {
    worker_->zeroed.clear();
    return tidy();
  }
  if (i < operations.size()) plan_undo(operations[i], done);
  while (i-- > 0) plan_undo(operations[i], operations[i].pages.size());
  undo();
}

bool Mapper::lacks_stock() const {
  return !worker_->barren && worker_->stock.size() < worker_->wanted &&
         created_ < std::min(pool_->budget(), pool_->limit());
}

// One part, or what the stock lacks if that is less; given up when something else is to be done.
void Mapper::fill(std::unique_lock<std::mutex>& lock) {
  const auto begin = std::chrono::steady_clock::now();
  auto now = begin;
  worker_->busy = true;
  while (lacks_stock() && worker_->log.empty() && !worker_->stopping && now - begin < kPart) {
    lock.unlock();
    Handle handle = 0;
    const Result result = driver_->create(&handle, pool_->page_size());
    now = std::chrono::steady_clock::now();
    lock.lock();
    if (result == kSuccess) {
      created_ += 1;
      worker_->stock.push_back(handle);
    } else {
      worker_->barren = true;
    }
  }
  worker_->busy = false;
  worker_->rested = now + kRests * (now - begin);
  worker_->finished.notify_all();
}

Result Mapper::create(PageId page) {
  {
    const std::lock_guard lock(worker_->mutex);
    if (!worker_->stock.empty()) {
      pool_->handle(page) = worker_->stock.front();
      worker_->stock.pop_front();
      return kSuccess;
    }
  }
  const Result result = driver_->create(&pool_->handle(page), pool_->page_size());
  if (result == kSuccess) created_ += 1;
  return result;
}

bool Mapper::release(Handle handle) {
  if (driver_->release(handle) != kSuccess) return false;
  created_ -= 1;
  return true;
}

void Mapper::check() {
  if (fork_.forked()) throw std::logic_error("the worker is not running");
  wait(last_);
  std::unique_lock lock(worker_->mutex);
  worker_->finished.wait(lock, [&] { return worker_->log.empty() && !worker_->busy; });
  const PoolCounts counts = pool_->counts();
  const std::size_t used = counts.budget - counts.absent + worker_->stock.size();
  if (used + worker_->released.size() != created_) throw std::logic_error("memory was lost, or is in the books twice");
  if (used > counts.budget) throw std::logic_error("there is more memory than the budget");
}

// What a transaction has no more use for. A call that fails here takes nothing back; it is made again with the next
// transaction, and when the thread ends, which is the `last` time: what fails then is left behind. While something is
// to be undone, that needs memory.
void Mapper::tidy(bool last) {
  std::erase_if(worker_->left_over, [&](Window& window) { return close(window); });
  if (last || worker_->undoing.empty())
    std::erase_if(worker_->released, [&](Handle handle) { return release(handle); });
  if (!last) return;
  const std::size_t page_size = pool_->page_size();
  for (const Window& window : worker_->left_over) {
    Remains remains{driver_, page_size, window.pages * page_size, {window.address}};
    for (std::size_t page = 0; page < window.mapped; ++page)
      remains.mapped.push_back(window.address + page * page_size);
    leave_behind(std::move(remains));
  }
  worker_->left_over.clear();
  if (worker_->released.empty()) return;
  created_ -= worker_->released.size();
  leave_behind({.driver = driver_, .handles = std::exchange(worker_->released, {})});
}

// Maps all that is to be zeroed, side by side; false at the first call that fails.
bool Mapper::open(Window& window, Call* call, Result* result) {
  const std::vector<Handle>& handles = worker_->zeroed;
  const std::size_t page_size = pool_->page_size();
  if (handles.empty()) return true;
  *call = Call::kReserve;
  *result = driver_->reserve(&window.address, handles.size() * page_size, page_size & (~page_size + 1));
  if (*result != kSuccess) return false;
  window.pages = handles.size();
  *call = Call::kMap;
  for (; window.mapped < window.pages; ++window.mapped) {
    *result = driver_->map(window.address + window.mapped * page_size, page_size, handles[window.mapped], true);
    if (*result != kSuccess) return false;
  }
  *call = Call::kSetAccess;
  *result = driver_->set_access(window.address, window.pages * page_size, Access::kReadWrite);
  return *result == kSuccess;
}

// False, with what is left of the window, if a call fails.
bool Mapper::close(Window& window) {
  const std::size_t page_size = pool_->page_size();
  while (window.mapped > 0) {
    const std::size_t together = driver_->unmap_ranges() ? window.mapped : 1;
    const Address at = window.address + (window.mapped - together) * page_size;
    if (driver_->unmap(at, together * page_size) != kSuccess) return false;
    window.mapped -= together;
  }
  if (window.pages && driver_->free(window.address, window.pages * page_size) != kSuccess) return false;
  window.pages = 0;
  return true;
}

bool Mapper::zero(const Window& window, Call* call, Result* result) {
  if (window.pages == 0) return true;
  bool touched = false;
  *result = driver_->zero(window.address, window.pages * pool_->page_size(), call, &touched);
  if (*result != kSuccess && touched) ruined_ = true;
  return *result == kSuccess;
}

// Maps pages side by side, counting those that are done; false at the first call that fails.
bool Mapper::map(Address address, const std::vector<Handle>& handles, Access access, bool restores, std::size_t* done,
                 Call* call, Result* result) {
  const std::size_t page_size = pool_->page_size();
  *call = Call::kMap;
  for (; *done < handles.size(); ++*done) {
    *result = driver_->map(address + *done * page_size, page_size, handles[*done], restores);
    if (*result != kSuccess) return false;
  }
  // Once for the range: it is the dearest call on CUDA, and its price does not depend on the range's size.
  *call = Call::kSetAccess;
  *result = driver_->set_access(address, handles.size() * page_size, access);
  return *result == kSuccess;
}

// Unmaps neighbouring pages likewise.
bool Mapper::unmap(Address address, std::size_t pages, std::size_t* done, Call* call, Result* result) {
  const std::size_t page_size = pool_->page_size(), together = driver_->unmap_ranges() ? pages : 1;
  *call = Call::kUnmap;
  for (; *done < pages; *done += together) {
    *result = driver_->unmap(address + *done * page_size, together * page_size);
    if (*result != kSuccess) return false;
  }
  return true;
}

// Performs an operation, counting the pages that are done; false at the first call that fails.
bool Mapper::perform(const Operation& operation, std::size_t* done, Call* call, Result* result) {
  const std::vector<PageId>& pages = operation.pages;
  switch (operation.kind) {
    case Operation::Kind::kCreate:
      *call = Call::kCreate;
      for (; *done < pages.size(); ++*done)
        if (*result = create(pages[*done]); *result != kSuccess) return false;
      return true;
    case Operation::Kind::kRelease:
      for (; *done < pages.size(); ++*done) worker_->released.push_back(pool_->handle(pages[*done]));
      return true;
    case Operation::Kind::kZero:
      for (; *done < pages.size(); ++*done) worker_->zeroed.push_back(pool_->handle(pages[*done]));
      return true;
    case Operation::Kind::kMap:
      return map(operation.address, handles(pages, pages.size()), operation.access, false, done, call, result);
    case Operation::Kind::kUnmap:
      return unmap(operation.address, pages.size(), done, call, result);
    case Operation::Kind::kFence:
      *result = driver_->synchronize(operation.event.get(), call);
      return *result == kSuccess;
  }
  return false;
}

std::vector<Handle> Mapper::handles(const std::vector<PageId>& pages, std::size_t count) {
  std::vector<Handle> found(count);
  std::transform(pages.begin(), pages.begin() + static_cast<std::ptrdiff_t>(count), found.begin(),
                 [&](PageId page) { return pool_->handle(page); });
  return found;
}

// Undoes the first `done` pages of an operation: at once where that takes no call, else after what is planned already.
void Mapper::plan_undo(const Operation& operation, std::size_t done) {
  if (done == 0) return;
  switch (operation.kind) {
    case Operation::Kind::kCreate: {  // released before what the transaction itself releases, which its undo takes back
      const std::vector<Handle> created = handles(operation.pages, done);
      worker_->released.insert(worker_->released.begin(), created.begin(), created.end());
      return;
    }
    case Operation::Kind::kRelease:
      for (; done-- > 0; worker_->released.pop_back()) pool_->handle(operation.pages[done]) = worker_->released.back();
      return;
    case Operation::Kind::kZero:
      worker_->zeroed.resize(worker_->zeroed.size() - done);
      return;
    case Operation::Kind::kMap:
    case Operation::Kind::kUnmap:
      worker_->undoing.push_back({operation.kind == Operation::Kind::kUnmap, operation.address, operation.access,
                                  handles(operation.pages, done)});
      return;
    case Operation::Kind::kFence:
      return;
  }
}

// In order up to the first call that fails, since what follows may rest on it.
void Mapper::undo() {
  Call call;
  Result result;
  const auto undone = [&](Undo& undo) {
    return undo.maps ? map(undo.address, undo.handles, undo.access, true, &undo.done, &call, &result)
                     : unmap(undo.address, undo.handles.size(), &undo.done, &call, &result);
  };
  auto& undoing = worker_->undoing;
  while (!undoing.empty() && undone(undoing.front())) undoing.pop_front();
  broken_ = ruined_ || !undoing.empty();
  tidy();
}

}  // namespace vattn
