// The worker and its log: order, waiting, stopping, and what crosses between threads.
#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "check.h"
#include "support.h"

using namespace vattn;

namespace {

const AddressSpace::Shape kShape{1, 4, 1, 8};

// Holds the worker at its next driver call until it is opened.
class Gate {
 public:
  Gate()
      : interception_([this](Call call) {
          if (call == Call::kReserve || call == Call::kFree) return Result{kSuccess};
          std::unique_lock lock(mutex_);
          opened_.wait(lock, [this] { return open_; });
          return Result{kSuccess};
        }) {}
  ~Gate() { open(); }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    opened_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  bool open_ = false;
  Interception interception_;
};

}  // namespace

TEST(tickets_come_in_order_and_pass_in_order) {
  World world(kShape, 32);
  CHECK_EQ(world.mapper->last(), 0u);
  CHECK(world.mapper->passed(0));
  CHECK(!world.mapper->passed(1));
  std::vector<std::shared_ptr<Transaction>> submitted;
  for (Ticket ticket = 1; ticket <= 200; ++ticket) {
    submitted.push_back(world.submit([&](Transaction& t) {
      if (ticket % 3 == 0) return;  // empty ones take their turn too
      const std::size_t slot = ticket % 4;
      if (world.space->columns(slot) < 8)
        world.space->grow(t, slot, 1);
      else
        world.space->shrink(t, slot, 8);
    }));
    CHECK_EQ(submitted.back()->ticket(), ticket);
    CHECK_EQ(world.mapper->last(), ticket);
    // Nothing passes before what was submitted earlier.
    for (std::size_t i = submitted.size(), pending = 0; i-- > 0;) {
      const bool passed = world.mapper->passed(submitted[i]->ticket());
      CHECK(!(passed && submitted[i]->status() == Status::kPending));
      pending += !passed;
      if (passed && i > 0) CHECK(world.mapper->passed(submitted[i - 1]->ticket()));
    }
  }
  world.mapper->wait(100);
  CHECK(world.mapper->passed(100));
  world.mapper->wait(200);
  world.mapper->wait(1);
  for (const auto& transaction : submitted) CHECK(transaction->status() == Status::kDone);
  CHECK(!world.mapper->failed());
  CHECK(take_failures(*world.mapper).empty());
  world.space->check();
  CHECK(world.clear() == Status::kDone);
}

TEST(nothing_passes_while_the_worker_is_held) {
  World world(kShape, 32, intercepted_vmm());
  Gate gate;
  const auto held = world.submit([&](Transaction& t) { world.space->grow(t, 0, 1); });
  const auto behind = world.submit([](Transaction&) {});
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(!world.mapper->passed(held->ticket()));
  CHECK(!world.mapper->passed(behind->ticket()));
  CHECK(held->status() == Status::kPending);
  CHECK(behind->status() == Status::kPending);
  gate.open();
  world.mapper->wait(behind->ticket());
  CHECK(held->status() == Status::kDone);
  CHECK(behind->status() == Status::kDone);
  CHECK(world.clear() == Status::kDone);
}

TEST(several_threads_wait_while_the_caller_submits) {
  World world(kShape, 32);
  constexpr Ticket kTickets = 400;
  std::atomic<int> wrong{0};
  const auto wait_for = [&](Ticket ticket) {
    while (world.mapper->last() < ticket) std::this_thread::yield();
    world.mapper->wait(ticket);
  };
  std::vector<std::thread> waiters;
  for (int i = 0; i < 4; ++i)
    waiters.emplace_back([&, i] {
      for (Ticket ticket = 1; ticket <= kTickets; ticket += static_cast<Ticket>(1 + i)) {
        wait_for(ticket);
        wrong += !world.mapper->passed(ticket);
      }
      wait_for(kTickets);
      // What the worker did is visible to whoever waited: the last transaction mapped these.
      for (std::size_t column = 0; column < 8; ++column) wrong += word(world.at(0, 3, 0, column)) != 0;
    });
  for (Ticket ticket = 1; ticket < kTickets; ++ticket) {
    const std::size_t slot = ticket % 3;
    world.submit([&](Transaction& t) {
      if (world.space->columns(slot) < 8)
        world.space->grow(t, slot, 1);
      else
        world.space->shrink(t, slot, 8);
    });
  }
  world.submit([&](Transaction& t) { world.space->grow(t, 3, 8); });
  for (std::thread& waiter : waiters) waiter.join();
  CHECK_EQ(wrong, 0);
  CHECK(world.clear() == Status::kDone);
}

// Whoever sees that a ticket has passed sees that it failed: a caller that polls must not miss it.
TEST(a_failure_is_visible_once_its_ticket_has_passed) {
  World world(kShape, 32, intercepted_vmm());
  const Interception fault([](Call call) { return call == Call::kMap ? kUnknown : kSuccess; });
  for (int round = 0; round < (VATTN_TSAN ? 500 : 4000); ++round) {
    const auto transaction = world.submit([&](Transaction& t) { world.space->grow(t, 0, 1); });
    while (!world.mapper->passed(transaction->ticket())) {
    }
    CHECK(world.mapper->failed());
    CHECK(transaction->status() == Status::kFailed);
    for (const auto& failure : take_failures(*world.mapper)) failure->revert();
    CHECK(!world.mapper->failed());
  }
}

TEST(after_a_failure_everything_is_cancelled_until_it_is_collected) {
  World world(kShape, 32, intercepted_vmm());
  std::atomic<bool> failing{true};
  const Interception fault([&](Call call) { return call == Call::kMap && failing ? kMapFailed : kSuccess; });
  const auto failed = world.submit([&](Transaction& t) { world.space->grow(t, 0, 1); });
  world.mapper->wait(failed->ticket());
  failing = false;
  const auto cancelled = world.submit([&](Transaction& t) { world.space->grow(t, 1, 1); });
  const auto empty = world.submit([](Transaction&) {});
  world.mapper->wait(empty->ticket());
  CHECK(cancelled->status() == Status::kCancelled);
  CHECK(empty->status() == Status::kCancelled);
  CHECK(failed->failed_call() == Call::kMap);
  CHECK_EQ(failed->failed_result(), kMapFailed);
  const auto failures = take_failures(*world.mapper);
  CHECK(failures == (std::vector{failed, cancelled, empty}));
  for (auto it = failures.rbegin(); it != failures.rend(); ++it) (*it)->revert();
  CHECK(take_failures(*world.mapper).empty());
  CHECK_EQ(world.driver->stats(Call::kMap).count, 1u);
  CHECK(world.grow(1, 1) == Status::kDone);
  CHECK_EQ(word(world.at(0, 1, 0, 0)), 0u);
  CHECK(!write_faults(world.at(0, 1, 0, 0)));
  CHECK(world.clear() == Status::kDone);
}

TEST(stop_executes_what_is_in_the_log) {
  World world(kShape, 32, intercepted_vmm());
  std::vector<std::shared_ptr<Transaction>> submitted;
  {
    Gate gate;
    for (std::size_t slot = 0; slot < 4; ++slot)
      for (int i = 0; i < 4; ++i)
        submitted.push_back(world.submit([&](Transaction& t) { world.space->grow(t, slot, 2); }));
    std::thread opener([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      gate.open();
    });
    world.mapper->stop();
    opener.join();
  }
  for (const auto& transaction : submitted) CHECK(transaction->status() == Status::kDone);
  CHECK(world.mapper->passed(16));
  world.mapper->wait(16);
  world.space->check();
  world.mapper->stop();
  CHECK_THROWS(std::logic_error, world.submit([](Transaction&) {}));
  CHECK_EQ(world.mapper->last(), 16u);
  CHECK(take_failures(*world.mapper).empty());
}

TEST(stop_with_failures_left_hands_them_over_still) {
  World world(kShape, 32, intercepted_vmm());
  const Interception fault([](Call call) { return call == Call::kCreate ? kOutOfMemory : kSuccess; });
  const auto failed = world.submit([&](Transaction& t) { world.space->grow(t, 0, 1); });
  const auto cancelled = world.submit([](Transaction&) {});
  world.mapper->stop();
  CHECK(failed->status() == Status::kFailed);
  CHECK(cancelled->status() == Status::kCancelled);
  const auto failures = take_failures(*world.mapper);
  CHECK(failures == (std::vector{failed, cancelled}));
  for (auto it = failures.rbegin(); it != failures.rend(); ++it) (*it)->revert();
  CHECK_EQ(world.pool->counts().taken, 0u);
}

TEST(a_ticket_that_was_never_submitted_is_refused) {
  World world(kShape, 32);
  CHECK_THROWS(std::logic_error, world.mapper->wait(1));
  CHECK(world.run([](Transaction&) {}) == Status::kDone);
  world.mapper->wait(world.mapper->last());
  CHECK_THROWS(std::logic_error, world.mapper->wait(world.mapper->last() + 1));
}

TEST(several_threads_stop_and_each_returns_when_the_worker_has_ended) {
  for (int round = 0; round < 20; ++round) {
    World world(kShape, 32);
    const auto last = world.submit([&](Transaction& t) { world.space->grow(t, 0, 8); });
    std::atomic<int> early{0};
    std::vector<std::thread> stoppers;
    for (int i = 0; i < 4; ++i)
      stoppers.emplace_back([&] {
        world.mapper->stop();
        early += last->status() != Status::kDone;
      });
    for (std::thread& stopper : stoppers) stopper.join();
    CHECK_EQ(early, 0);
    CHECK_THROWS(std::logic_error, world.mapper->submit(std::make_shared<Transaction>()));
  }
}

TEST(signals_are_free_again_where_no_thread_can_be_started) {
#if VATTN_TSAN
  SKIP("TSan ends the process where no thread can be started");
#else
  pthread_attr_t usual, huge;
  CHECK_EQ(pthread_getattr_default_np(&usual), 0);
  CHECK_EQ(pthread_getattr_default_np(&huge), 0);
  CHECK_EQ(pthread_attr_setstacksize(&huge, std::size_t{1} << 50), 0);  // more than there are addresses
  sigset_t before, after;
  pthread_sigmask(SIG_SETMASK, nullptr, &before);
  const auto driver = std::make_shared<Driver>(host_vmm(), host_prop(12), nullptr, 0, 0);
  CHECK_EQ(pthread_setattr_default_np(&huge), 0);
  bool thrown = false;
  try {
    Mapper(driver, std::make_shared<PagePool>(4096, 1));
  } catch (const std::system_error&) {
    thrown = true;
  }
  CHECK_EQ(pthread_setattr_default_np(&usual), 0);
  CHECK(thrown);
  pthread_sigmask(SIG_SETMASK, nullptr, &after);
  for (int signal = 1; signal < 32; ++signal) CHECK_EQ(sigismember(&before, signal), sigismember(&after, signal));
#endif
}

TEST(the_destructor_stops) {
  std::vector<std::shared_ptr<Transaction>> submitted;
  World world(kShape, 32);
  for (int i = 0; i < 8; ++i) submitted.push_back(world.submit([&](Transaction& t) { world.space->grow(t, 0, 1); }));
  world.mapper.reset();
  for (const auto& transaction : submitted) CHECK(transaction->status() == Status::kDone);
  world.space->check();
  for (int i = 0; i < 50; ++i) Mapper(world.driver, world.pool).stop();
  for (int i = 0; i < 50; ++i) Mapper(world.driver, world.pool);
}

// What transactions hold may need the interpreter's lock to go, for which the worker must not wait.
TEST(transactions_are_destroyed_on_the_callers_thread) {
  struct Witness {
    std::thread::id caller = std::this_thread::get_id();
    std::atomic<int>* elsewhere;
    std::atomic<int>* gone;
    ~Witness() { *gone += 1, *elsewhere += std::this_thread::get_id() != caller; }
  };
  std::atomic<int> elsewhere{0}, gone{0};
  {
    std::size_t calls = 0;
    const Interception fault([&](Call call) { return call == Call::kMap && ++calls % 50 == 0 ? kUnknown : kSuccess; });
    World world(kShape, 32, intercepted_vmm());
    for (int i = 0; i < 500; ++i) {
      auto transaction = std::make_shared<Transaction>();
      auto witness = std::make_shared<Witness>();
      witness->elsewhere = &elsewhere, witness->gone = &gone;
      transaction->on_revert([witness = std::move(witness)] {});
      const std::size_t columns = world.space->columns(0);
      columns < 8 ? world.space->grow(*transaction, 0, 1) : world.space->shrink(*transaction, 0, 8);
      world.mapper->submit(std::move(transaction));
      CHECK(i != 149 || gone >= 50);  // those that were done go as others are submitted
      if (i % 100 == 50) {
        const auto failures = take_failures(*world.mapper);
        for (auto it = failures.rbegin(); it != failures.rend(); ++it) (*it)->revert();
      }
    }
  }
  CHECK_EQ(gone, 500);
  CHECK_EQ(elsewhere, 0);
}

TEST(the_worker_has_the_context_and_no_signals) {
  static std::atomic<int> contexts;
  static void* given;
  static std::thread::id worker;
  static bool blocked;
  contexts = 0;
  Vmm table = host_vmm();
  table.set_context = [](void* context) -> Result {
    contexts += 1, given = context, worker = std::this_thread::get_id();
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, nullptr, &mask);
    blocked = sigismember(&mask, SIGINT) == 1 && sigismember(&mask, SIGTERM) == 1;
    return kSuccess;
  };
  sigset_t before, after;
  pthread_sigmask(SIG_SETMASK, nullptr, &before);
  int context = 0;
  const auto driver = std::make_shared<Driver>(table, host_prop(12), &context, 0, 0);
  Mapper(driver, std::make_shared<PagePool>(4096, 1)).stop();
  CHECK_EQ(contexts, 1);
  CHECK_EQ(given, &context);
  CHECK(worker != std::this_thread::get_id());
  CHECK(blocked);
  pthread_sigmask(SIG_SETMASK, nullptr, &after);
  for (int signal = 1; signal < 32; ++signal) CHECK_EQ(sigismember(&before, signal), sigismember(&after, signal));
}

namespace {

// The caller grows and shrinks slots at random, ahead of the worker, and uses their memory once the tickets have
// passed. Returns how often it saw what it should not.
int hammer(std::uint64_t seed, std::chrono::milliseconds duration) try {
  constexpr std::size_t kSlots = 6, kColumns = 12, kLanes = 4;
  Random random(seed);
  World world({2, kSlots, 2, kColumns}, kLanes * 40, host_vmm(), 12 + 2 * static_cast<int>(seed % 2));
  struct Slot {
    Ticket ticket = 0;                  // of the last change
    std::vector<std::uint64_t> stamps;  // what was last written, by column, then lane
  };
  std::vector<Slot> slots(kSlots);
  std::uint64_t next = 0;
  int wrong = 0;
  const auto end = std::chrono::steady_clock::now() + duration;
  for (std::size_t step = 1; std::chrono::steady_clock::now() < end; ++step) {
    const std::size_t index = random.below(kSlots);
    Slot& slot = slots[index];
    const std::size_t columns = world.space->columns(index);
    const PoolCounts counts = world.pool->counts();
    switch (random.below(8)) {
      case 0:
      case 1:
      case 2: {
        const std::size_t room = std::min((counts.free + counts.absent) / kLanes, kColumns - columns);
        const std::size_t count = random.below(room + 1);
        slot.ticket = world.submit([&](Transaction& t) { world.space->grow(t, index, count); })->ticket();
        break;
      }
      case 3: {
        const std::size_t count = random.below(columns + 1);
        slot.ticket = world.submit([&](Transaction& t) { world.space->shrink(t, index, count); })->ticket();
        slot.stamps.resize(std::min(slot.stamps.size(), (columns - count) * kLanes));
        break;
      }
      case 4:
        world.submit([&](Transaction& t) { release_free(*world.pool, t, random.below(8)); });
        break;
      default:
        world.mapper->wait(slot.ticket);
        for (std::size_t i = 0; i < columns * kLanes; ++i) {
          const std::size_t lane = i % kLanes;
          const Word here = word(world.at(lane / 2, index, lane % 2, i / kLanes));
          if (i == slot.stamps.size())
            slot.stamps.push_back(0);  // new, with whatever its last owner left
          else
            wrong += here != slot.stamps[i];
          here = slot.stamps[i] = ++next;
        }
    }
    if (step % 64 == 0) {
      world.mapper->wait(world.mapper->last());
      world.space->check();
      world.pool->check();
    }
  }
  wrong += next == 0;
  wrong += world.clear() != Status::kDone;
  return wrong;
} catch (const std::exception& error) {
  std::puts(error.what());
  return 1;
}

}  // namespace

TEST(a_caller_ahead_of_its_worker) {
  const HostUsage before = host_usage();
  CHECK_EQ(hammer(1, std::chrono::milliseconds(700)), 0);
  CHECK_EQ(host_usage().physical_bytes, before.physical_bytes);
  CHECK_EQ(host_usage().reservations, before.reservations);
}

TEST(two_callers_with_a_worker_each) {
  const HostUsage before = host_usage();
  int wrong[2]{};
  std::thread second([&] { wrong[1] = hammer(2, std::chrono::milliseconds(1000)); });
  wrong[0] = hammer(3, std::chrono::milliseconds(1000));
  second.join();
  CHECK_EQ(wrong[0], 0);
  CHECK_EQ(wrong[1], 0);
  CHECK_EQ(host_usage().physical_bytes, before.physical_bytes);
  CHECK_EQ(host_usage().kernel_mappings, before.kernel_mappings);
}

namespace {

// The host's table, in which a stream captures a graph if a test says so.
const StreamHandle kStream = reinterpret_cast<StreamHandle>(std::uintptr_t{64});
bool captures = false;
std::atomic<int> waits = 0;

Vmm capturing_vmm() {
  Vmm table = host_vmm();
  table.stream_is_capturing = [](StreamHandle stream, unsigned* status) {
    *status = captures && stream == kStream;
    return Result{kSuccess};
  };
  table.context_synchronize = [] {
    waits += 1;
    return Result{kSuccess};
  };
  return table;
}

std::shared_ptr<Driver> capturing_driver() {
  waits = 0;
  return std::make_shared<Driver>(capturing_vmm(), host_prop(12), nullptr, 0, kMapRestore, true, true,
                                  std::vector<StreamHandle>{kStream});
}

// A space with pages at the start of slot 0, to which the worker and its log have no reference any more.
std::shared_ptr<AddressSpace> grown_space(const std::shared_ptr<Driver>& driver, const std::shared_ptr<PagePool>& pool,
                                          std::size_t pages) {
  auto space = std::make_shared<AddressSpace>(driver, pool, kShape);
  Mapper mapper(driver, pool);
  auto transaction = std::make_shared<Transaction>();
  space->grow(*transaction, 0, pages);
  mapper.wait(mapper.submit(std::move(transaction)));
  return space;
}

}  // namespace

TEST(a_context_is_not_synchronised_while_a_stream_of_the_driver_captures) {
  const auto driver = capturing_driver();
  const auto pool = std::make_shared<PagePool>(4096, 1);
  Mapper mapper(driver, pool);
  const auto fence = [&] {
    auto transaction = std::make_shared<Transaction>();
    transaction->add({Operation::Kind::kFence, {}});
    mapper.wait(mapper.submit(transaction));
    return transaction;
  };
  captures = true;
  CHECK(driver->any_capturing());
  const auto refused = fence();
  captures = false;
  CHECK(refused->status() == Status::kFailed);
  CHECK(refused->failed_call() == Call::kContextSynchronize);
  CHECK_EQ(refused->failed_result(), Result{kCaptureUnsupported});
  CHECK_EQ(waits, 0);
  CHECK_EQ(take_failures(mapper).size(), 1u);
  CHECK(!driver->any_capturing());
  CHECK(fence()->status() == Status::kDone);
  CHECK_EQ(waits, 1);
}

TEST(a_space_that_goes_during_a_capture_is_unmapped_after_it) {
  const auto driver = capturing_driver();
  const auto pool = std::make_shared<PagePool>(4096, 8);
  const std::size_t before = host_usage().reservations;
  {
    auto space = grown_space(driver, pool, 3);
    const Address address = space->base(0);
    word(address) = 7;
    captures = true;
    space.reset();
    CHECK_EQ(word(address), 7u);
    const AddressSpace other(driver, pool, kShape);
    CHECK_EQ(host_usage().reservations, before + 2);
    CHECK_EQ(waits, 0);
    captures = false;
  }
  // As the other space went.
  CHECK_EQ(waits, 1);
  CHECK_EQ(host_usage().reservations, before);
}

TEST(a_space_stays_mapped_if_kernels_cannot_be_waited_for) {
  Vmm table = host_vmm();
  table.context_synchronize = [] { return Result{kUnknown}; };
  const auto driver = std::make_shared<Driver>(table, host_prop(12), nullptr, 0, kMapRestore);
  const auto pool = std::make_shared<PagePool>(4096, 8);
  auto space = grown_space(driver, pool, 1);
  const Address address = space->base(0);
  word(address) = 7;
  space.reset();
  CHECK_EQ(word(address), 7u);
}

TEST(read_only_mappings_are_writable_where_the_provider_refuses_them) {
  Vmm table = host_vmm();
  table.set_access = [](Address address, std::size_t size, const AccessDesc* descs, std::size_t count) {
    return descs->flags == 1 ? Result{kNotSupported} : host_vmm().set_access(address, size, descs, count);
  };
  const auto usage = host_usage();
  for (const bool refuses : {false, true}) {
    Driver driver(refuses ? table : host_vmm(), host_prop(12), nullptr, 0, kMapRestore);
    CHECK_EQ(driver.try_read_only(4096), !refuses);
  }
  CHECK_EQ(host_usage().reservations, usage.reservations);
  CHECK_EQ(host_usage().handles, usage.handles);
  const auto driver =
      std::make_shared<Driver>(table, host_prop(12), nullptr, 0, kMapRestore, true, /*read_only=*/false);
  const auto pool = std::make_shared<PagePool>(4096, 8);
  const auto space = std::make_shared<AddressSpace>(driver, pool, kShape);
  Mapper mapper(driver, pool);
  auto transaction = std::make_shared<Transaction>();
  space->grow(*transaction, 0, 1);
  alias(*space, *transaction, 1, 0, 1, Access::kRead);
  mapper.wait(mapper.submit(transaction));
  CHECK(transaction->status() == Status::kDone);
  space->check();
  std::unordered_map<PageId, AddressSpace::Users> users;
  space->count(users);
  CHECK_EQ(users[0].holders, 2u);
  CHECK_EQ(users[0].writers, 1u);  // by the books, which no fault enforces here
  mapper.submit(std::make_shared<Transaction>());
}

namespace {

// Until the worker has filled the stock as far as it will.
bool stocked(World& world, std::size_t pages) {
  for (int tries = 0; tries < 2000 && world.mapper->stocked() != pages; ++tries)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return world.mapper->stocked() == pages;
}

}  // namespace

TEST(the_stock_is_filled_and_used) {
  World world(kShape, 16);
  world.mapper->stock(5);
  CHECK(stocked(world, 5));
  CHECK_EQ(world.pool->counts().absent, 16u);  // the books know nothing of it
  CHECK_EQ(world.mapper->created(), 5u);
  world.mapper->check();
  const std::uint64_t made = world.driver->stats(Call::kCreate).count;
  CHECK_EQ(made, 5u);
  world.mapper->stock(0);  // what is there stays, and is not replaced
  world.run([&](Transaction& t) { world.space->grow(t, 0, 3); });
  CHECK_EQ(world.driver->stats(Call::kCreate).count, made);
  CHECK_EQ(world.mapper->stocked(), 2u);
  CHECK_EQ(word(world.at(0, 0, 0, 2)), 0u);
  world.run([&](Transaction& t) { world.space->grow(t, 1, 4); });
  CHECK_EQ(world.driver->stats(Call::kCreate).count, made + 2);
  CHECK_EQ(world.mapper->stocked(), 0u);
  world.mapper->check();
}

TEST(the_stock_is_within_the_budget) {
  World world(kShape, 10);
  world.run([&](Transaction& t) { world.space->grow(t, 0, 6); });
  world.mapper->stock(100);
  CHECK(stocked(world, 4));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK_EQ(world.mapper->created(), 10u);
  world.mapper->check();
  world.run([&](Transaction& t) { world.space->grow(t, 1, 4); });
  CHECK_EQ(world.mapper->stocked(), 0u);
  world.mapper->check();
}

TEST(the_stock_is_given_back) {
  World world(kShape, 16);
  const std::size_t before = host_usage().physical_bytes;
  CHECK_EQ(world.mapper->unstock(), 0u);
  world.mapper->stock(7);
  CHECK(stocked(world, 7));
  CHECK_EQ(world.mapper->unstock(), 7u);
  CHECK_EQ(host_usage().physical_bytes, before);
  world.mapper->check();
  world.mapper->stock(7);
  CHECK(stocked(world, 7));
  world.mapper->stop();
  CHECK_EQ(host_usage().physical_bytes, before);
  CHECK_EQ(world.mapper->unstock(), 0u);
}

TEST(giving_the_stock_back_while_it_is_filled) {
  World world(kShape, 4096);
  const std::size_t before = host_usage().physical_bytes;
  for (int round = 0; round < 200; ++round) {
    world.mapper->stock(8);
    world.mapper->unstock();
    CHECK_EQ(world.mapper->stocked(), 0u);
    CHECK_EQ(host_usage().physical_bytes, before);
  }
  world.mapper->check();
}

TEST(a_fill_that_fails_changes_nothing) {
  World world(kShape, 16, intercepted_vmm());
  {
    std::atomic<int> left{3};
    const Interception interception(
        [&](Call call) { return call == Call::kCreate && left-- <= 0 ? Result{kOutOfMemory} : Result{kSuccess}; });
    world.mapper->stock(8);
    CHECK(stocked(world, 3));
    while (left >= 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(left == -1);  // not tried again
    CHECK(!world.mapper->failed());
    world.run([&](Transaction& t) { world.space->grow(t, 0, 3); });  // the machine has no more: these are there
    world.mapper->check();
    CHECK_EQ(world.mapper->stocked(), 0u);
  }
  world.mapper->stock(8);
  CHECK(stocked(world, 8));
  world.mapper->check();
}

TEST(a_transaction_that_fails_gives_what_it_took_from_the_stock_back) {
  World world(kShape, 16, intercepted_vmm());
  world.mapper->stock(4);
  CHECK(stocked(world, 4));
  world.mapper->stock(0);
  auto failing = std::make_shared<Transaction>();
  {
    const Interception interception([](Call call) { return call == Call::kSetAccess ? Result{kUnknown} : kSuccess; });
    world.space->grow(*failing, 0, 3);
    world.mapper->wait(world.mapper->submit(failing));
    CHECK(failing->status() == Status::kFailed);
  }
  CHECK_EQ(world.mapper->failures().size(), 1u);
  failing->revert();
  world.mapper->resume();
  CHECK_EQ(world.mapper->created(), 1u);
  CHECK_EQ(world.mapper->stocked(), 1u);
  world.mapper->check();
}
