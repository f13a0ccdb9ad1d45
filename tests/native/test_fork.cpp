// What a forked child may do with what it inherited, and that its parent does not notice.
#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <thread>

#include "check.h"
#include "fork_guard.h"
#include "left_behind.h"
#include "support.h"

using namespace vattn;

namespace {

constexpr std::size_t kPage = 4096;
const AddressSpace::Shape kShape{2, 2, 1, 8};

#if VATTN_TSAN
#define FORK_TEST(name) [[maybe_unused]] static void name()
TEST(all_tests_of_forks) { SKIP("TSan does not support threads in a forked child"); }
#else
#define FORK_TEST(name) TEST(name)
#endif

// Runs the body in a child; false if it failed or did not end in time.
[[maybe_unused]] bool in_child(const std::function<void()>& body) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    int status = 0;
    try {
      body();
    } catch (const std::exception& error) {
      std::printf("  in the child: %s\n", error.what());
      status = 1;
    }
    std::fflush(stdout);
    _exit(status);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  if (WIFSIGNALED(status)) std::printf("  the child died of signal %d\n", WTERMSIG(status));
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

bool is_mapped(Address address) {
  unsigned char resident = 0;
  return mincore(reinterpret_cast<void*>(address), kPage, &resident) == 0;
}

int open_memfds() {
  int count = 0;
  DIR* directory = opendir("/proc/self/fd");
  while (const dirent* entry = readdir(directory)) {
    char target[256] = {};
    if (readlinkat(dirfd(directory), entry->d_name, target, sizeof target - 1) > 0)
      count += std::string(target).find("memfd:vattn") != std::string::npos;
  }
  closedir(directory);
  return count;
}

int mapped_memfds() {
  int count = 0;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) count += line.find("memfd:vattn") != std::string::npos;
  return count;
}

// Uses a world of its own from end to end.
void use_a_new_world() {
  const HostUsage before = host_usage();
  {
    World world(kShape, 24);
    CHECK(world.grow(0, 4) == Status::kDone);
    CHECK(world.alias(1, 0, 2, Access::kRead) == Status::kDone);
    word(world.at(1, 0, 0, 1)) = 77;
    CHECK_EQ(word(world.at(1, 1, 0, 1)), 77u);
    CHECK(write_faults(world.at(1, 1, 0, 1)));
    world.space->check();
    CHECK(world.clear() == Status::kDone);
  }
  CHECK_EQ(host_usage().physical_bytes, before.physical_bytes);
  CHECK_EQ(host_usage().reservations, before.reservations);
  CHECK_EQ(host_usage().kernel_mappings, before.kernel_mappings);
}

}  // namespace

FORK_TEST(a_child_knows_that_it_is_one) {
  const ForkGuard guard;
  CHECK(!guard.forked());
  CHECK(in_child([&] {
    CHECK(guard.forked());
    const ForkGuard own;
    CHECK(!own.forked());
    CHECK(in_child([&] { CHECK(guard.forked() && own.forked()); }));
    CHECK(!own.forked());
  }));
  CHECK(!guard.forked());
}

FORK_TEST(the_threads_of_a_child_start_anew_together) {
  World world(kShape, 24);
  CHECK(world.grow(0, 4) == Status::kDone);
  for (int round = 0; round < 20; ++round)
    CHECK(in_child([] {
      constexpr std::size_t kThreads = 4;
      std::atomic<std::size_t> ready{0}, failures{0};
      std::vector<std::thread> threads;
      for (std::size_t i = 0; i < kThreads; ++i)
        threads.emplace_back([&] {
          Address address = 0;
          ready += 1;
          while (ready < kThreads) continue;
          failures += host_vmm().address_reserve(&address, kPage, 0, 0, 0) != kSuccess;
        });
      for (std::thread& thread : threads) thread.join();
      CHECK_EQ(failures, 0u);
      CHECK_EQ(host_usage().reservations, kThreads);
    }));
}

FORK_TEST(a_child_closes_what_it_inherits_once) {
  Handle handle = 0;
  AllocationProp exported = host_prop(12);
  exported.requested_handle_types = kPosixFileDescriptor;
  CHECK(host_vmm().create(&handle, kPage, &exported, 0) == kSuccess);
  CHECK(in_child([] {
    const int own = open("/dev/zero", O_RDONLY);  // gets the number of the descriptor that was closed
    CHECK(in_child([&] {
      char byte = 1;
      CHECK_EQ(read(own, &byte, 1), 1);
    }));
  }));
  CHECK(host_vmm().release(handle) == kSuccess);
}

FORK_TEST(a_child_gives_back_what_its_own_calls_left_behind) {
  const auto leave = [] {
    const std::size_t before = host_usage().handles;
    const auto driver = std::make_shared<Driver>(host_vmm(), host_prop(12), nullptr, 0, 0);
    Handle handle = 0;
    CHECK(driver->create(&handle, kPage) == kSuccess);
    leave_behind({.driver = driver, .handles = {handle}});
    give_back_left_behind();
    CHECK_EQ(host_usage().handles, before);
  };
  leave();
  CHECK(in_child(leave));
}

FORK_TEST(a_child_inherits_no_memory_and_harms_none) {
  const HostUsage before = host_usage();
  int calls = 0;
  const Interception count([&](Call) { return ++calls, kSuccess; });
  World world(kShape, 24, intercepted_vmm());
  CHECK(world.grow(0, 4) == Status::kDone);
  CHECK(world.run([](Transaction&) {}) == Status::kDone);  // the first transaction, which holds the space, goes
  word(world.at(0, 0, 0, 3)) = 5;
  const Address base = world.space->base(0);
  CHECK(in_child([&] {
    // Neither what was mapped nor the rest of the reservation is there; others may use the addresses.
    CHECK(!is_mapped(base));
    CHECK(!is_mapped(base + 7 * kPage));
    void* own = mmap(reinterpret_cast<void*>(base), world.space->tensor_bytes(), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    CHECK_EQ(own, reinterpret_cast<void*>(base));
    word(base) = 6;
    // What was inherited refuses, and goes without a trace: not even a driver call, since a CUDA context would be dead.
    calls = 0;
    CHECK_THROWS(std::logic_error, world.submit([](Transaction&) {}));
    CHECK_THROWS(std::logic_error, world.submit([&](Transaction& t) { world.space->grow(t, 0, 1); }));
    world.mapper->wait(world.mapper->last() - 1);  // has passed before the fork
    CHECK_THROWS(std::logic_error, world.mapper->wait(world.mapper->last() + 1));
    CHECK_THROWS(std::logic_error, take_failures(*world.mapper));
    world.mapper->stop();
    world.mapper.reset();
    const std::weak_ptr<AddressSpace> space = world.space;
    world.space.reset();
    CHECK(space.expired());
    world.pool.reset();
    CHECK_EQ(calls, 0);
    CHECK(is_mapped(base));
    CHECK_EQ(word(base), 6u);
  }));
  CHECK_EQ(word(world.at(0, 0, 0, 3)), 5u);
  world.space->check();
  CHECK(world.grow(0, 1) == Status::kDone);
  CHECK(world.clear() == Status::kDone);
  CHECK_EQ(host_usage().physical_bytes, before.physical_bytes);
}

FORK_TEST(unmapped_again_is_not_inherited_either) {
  World world(kShape, 24);
  CHECK(world.grow(0, 4) == Status::kDone);
  CHECK(world.shrink(0, 2) == Status::kDone);
  const Address base = world.space->base(0);
  CHECK(in_child([&] {
    for (std::size_t page = 0; page < 8; ++page) CHECK(!is_mapped(base + page * kPage));
  }));
  CHECK(world.clear() == Status::kDone);
}

FORK_TEST(a_child_starts_anew) {
  World world(kShape, 24);
  CHECK(world.grow(0, 4) == Status::kDone);
  CHECK_EQ(open_memfds(), 1);
  CHECK(in_child([&] {
    const HostUsage usage = host_usage();
    CHECK_EQ(usage.physical_bytes, 0u);
    CHECK_EQ(usage.handles, 0u);
    CHECK_EQ(usage.reservations, 0u);
    CHECK_EQ(usage.kernel_mappings, 0u);
    CHECK_EQ(open_memfds(), 0);  // the parent's memory is not kept by its child
    use_a_new_world();
    world.mapper.reset();
    world.space.reset();
    use_a_new_world();
    CHECK(in_child(use_a_new_world));
    use_a_new_world();
  }));
  world.space->check();
  CHECK(world.clear() == Status::kDone);
  use_a_new_world();
}

FORK_TEST(forks_while_the_worker_works) {
  World world(kShape, 24);
  std::uint64_t value = 1;
  for (int i = 0; i < 30; ++i) {
    check::context = "fork " + std::to_string(i);
    for (int j = 0; j < 20; ++j) {
      world.submit([&](Transaction& t) { world.space->grow(t, 0, 8); });
      world.submit([&](Transaction& t) {
        world.space->shrink(t, 0, 8);
        release_free(*world.pool, t, 16);
      });
    }
    const auto pending = world.submit([&](Transaction& t) { world.space->grow(t, 0, 8); });
    CHECK(in_child([&] {
      CHECK_THROWS(std::logic_error, world.submit([](Transaction&) {}));
      if (!world.mapper->passed(pending->ticket()))
        CHECK_THROWS(std::logic_error, world.mapper->wait(pending->ticket()));
      world.mapper.reset();
      world.space.reset();
      use_a_new_world();
    }));
    world.mapper->wait(pending->ticket());
    world.space->check();
    word(world.at(1, 0, 0, 7)) = ++value;
    CHECK_EQ(word(world.at(1, 0, 0, 7)), value);
    CHECK(world.shrink(0, 8) == Status::kDone);
  }
  CHECK(world.clear() == Status::kDone);
}

// What keeps a file or a mapping of it keeps all of its memory, whatever becomes of its owner.
FORK_TEST(a_child_that_does_nothing_keeps_no_memory) {
  World world(kShape, 24);
  CHECK(world.grow(0, 4) == Status::kDone);
  CHECK(open_memfds() > 0);
  CHECK(mapped_memfds() > 0);
  CHECK(in_child([] {
    CHECK_EQ(open_memfds(), 0);
    CHECK_EQ(mapped_memfds(), 0);
    CHECK(in_child([] { CHECK_EQ(open_memfds(), 0); }));
  }));
  CHECK(open_memfds() > 0);
  CHECK(world.clear() == Status::kDone);
}

// The worker makes, maps and unmaps memory all the time.
FORK_TEST(a_fork_at_any_moment_inherits_no_memory) {
  World world({1, 1, 1, 64}, 64, host_vmm(), 16);
  std::atomic<bool> enough{false};
  std::thread busy([&] {
    while (!enough) {
      world.grow(0, 64);
      world.shrink(0, 64);
      world.clear();
    }
  });
  std::string found;
  for (int round = 0; round < 300 && found.empty(); ++round)
    if (!in_child([] {
          CHECK_EQ(open_memfds(), 0);
          CHECK_EQ(mapped_memfds(), 0);
          CHECK_EQ(host_usage().reservations, 0u);  // no lock is inherited either
        }))
      found = "fork " + std::to_string(round);
  enough = true;
  busy.join();
  CHECK_EQ(found, std::string());
}
