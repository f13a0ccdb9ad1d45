// The log of map and unmap operations, and the one thread that executes it.
//
// Decisions are taken, and the books changed, on the caller's thread, while a transaction is put together; the worker
// only executes, in order, and reports by ticket. A transaction is executed wholly or not at all: where a call fails,
// what the transaction did before is undone on the worker. From then on the log stands still: every later transaction
// is cancelled, because its decisions rest on those of the failed one, until the caller has asked for the failures,
// taken their decisions back in reverse order (Transaction::revert), and resumed the log.
//
// While the log is empty, the worker fills a stock: memory that pages created later take instead of waiting until it is
// made. In the books their pages are absent, so stocked pages never cause a refusal, and a fill that fails changes
// nothing.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "driver.h"
#include "fork_guard.h"
#include "page_pool.h"

namespace vattn {

struct Operation {
  // A fence waits for kernels: for its event, or for all that was launched where it has none. It changes nothing, so
  // there is nothing to undo. Release and zero are put off to the transaction's end: neither brings back what was
  // there.
  enum class Kind { kCreate, kRelease, kMap, kUnmap, kFence, kZero };
  Kind kind;
  std::vector<PageId> pages;  // of map and unmap: neighbours in the address space
  Address address = 0;        // of map and unmap: where the first page goes
  Access access = Access::kNone;
  std::shared_ptr<const Event> event = nullptr;
};

using Ticket = std::uint64_t;

enum class Status { kPending, kDone, kFailed, kCancelled };

class Transaction {
 public:
  // What has to be done, and how the books take the decision back.
  void add(Operation operation) { operations_.push_back(std::move(operation)); }
  // Drops a reference to each; what is free then is zeroed where the pool wants that. How to take it back is the
  // caller's to add.
  void drop(PagePool& pool, const std::vector<PageId>& pages);
  void on_revert(std::function<void()> undo) { undo_.push_back(std::move(undo)); }

  // Takes the decisions back, last one first. For a transaction that was never submitted, failed, or was cancelled.
  void revert();

  bool empty() const { return operations_.empty(); }
  Ticket ticket() const { return ticket_; }
  Status status() const { return status_.load(std::memory_order_acquire); }
  // Of a failed transaction.
  Call failed_call() const { return failed_call_; }
  Result failed_result() const { return failed_result_; }

 private:
  friend class Mapper;
  std::vector<Operation> operations_;
  std::vector<std::function<void()>> undo_;
  Ticket ticket_ = 0;
  std::atomic<Status> status_{Status::kPending};
  Call failed_call_ = Call::kMap;
  Result failed_result_ = kSuccess;
};

class Mapper {
 public:
  Mapper(std::shared_ptr<Driver> driver, std::shared_ptr<PagePool> pool);
  ~Mapper();  // stops
  Mapper(const Mapper&) = delete;
  Mapper& operator=(const Mapper&) = delete;

  // Appends to the log. Throws std::logic_error after stop().
  Ticket submit(std::shared_ptr<Transaction> transaction);

  // Blocks until the worker is past the ticket: it is done, failed or cancelled. Throws std::logic_error for one that
  // submit() never returned.
  void wait(Ticket ticket);
  bool passed(Ticket ticket) const { return passed_.load(std::memory_order_acquire) >= ticket; }
  Ticket last() const { return last_; }

  // True while the log stands still because of failures.
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  // Waits for the log to run dry; then what failed and was cancelled, oldest first. The log stands still until
  // resume().
  std::vector<std::shared_ptr<Transaction>> failures();
  // Forgets the failures, whose decisions were taken back, and lets the log go on.
  void resume();

  // Memory for this many pages is wanted in stock, as far as the budget has room for it; what is there beyond stays.
  // After a fill has failed, the next call tries again.
  void stock(std::size_t pages);
  std::size_t stocked() const;
  // Wants no stock, and blocks until all of it is given back; how many pages.
  std::size_t unstock();
  // Pages that have memory now: those of the log as far as it is executed, and the stock.
  std::size_t created() const { return created_.load(std::memory_order_acquire); }

  // Waits for the log to run dry. Throws std::logic_error if memory is lost, or there is more than the budget. Pre: the
  // log does not stand still.
  void check();

  // True while a failed transaction is not wholly undone, because a call failed in that as well: the mappings are not
  // what the books say.
  bool broken() const { return broken_.load(std::memory_order_acquire); }
  // True once nothing can mend that: memory may have been zeroed that somebody holds.
  bool ruined() const { return ruined_.load(std::memory_order_acquire); }
  // Goes on with undoing where a call failed; whether it is done. Pre: the log has run dry.
  bool mend();

  // Executes what was submitted, then ends the thread; from whichever and however many threads it is called, all return
  // when that is done. Does nothing in a forked child.
  void stop();

 private:
  struct Worker;  // what the thread writes to; leaked in a forked child, which may have been made in the midst of it
  void run();
  void execute(Transaction& transaction);
  // A range of addresses by which pages are zeroed that are mapped nowhere, or where they must not be written.
  struct Window {
    Address address = 0;
    std::size_t pages = 0, mapped = 0;
  };
  bool open(Window& window, Call* call, Result* result);
  bool close(Window& window);
  void tidy(bool last = false);
  bool lacks_stock() const;
  void fill(std::unique_lock<std::mutex>& lock);
  Result create(PageId page);
  bool release(Handle handle);
  bool zero(const Window& window, Call* call, Result* result);
  // Pages that are mapped again, or unmapped again.
  struct Undo {
    bool maps;
    Address address;
    Access access;
    std::vector<Handle> handles;
    std::size_t done = 0;
  };
  bool map(Address address, const std::vector<Handle>& handles, Access access, bool restores, std::size_t* done,
           Call* call, Result* result);
  bool unmap(Address address, std::size_t pages, std::size_t* done, Call* call, Result* result);
  bool perform(const Operation& operation, std::size_t* done, Call* call, Result* result);
  std::vector<Handle> handles(const std::vector<PageId>& pages, std::size_t count);
  void plan_undo(const Operation& operation, std::size_t done);
  void undo();

  const std::shared_ptr<Driver> driver_;
  const std::shared_ptr<PagePool> pool_;
  const ForkGuard fork_;
  std::unique_ptr<Worker> worker_;
  std::atomic<Ticket> last_{0};
  std::atomic<std::size_t> created_{0};
  std::once_flag stop_once_;
  std::atomic<Ticket> passed_{0};
  std::atomic<bool> failed_{false};
  std::atomic<bool> broken_{false};
  std::atomic<bool> ruined_{false};
};

}  // namespace vattn
