// What several test files need: seeded randomness, faults caught, the kernel's view, a table that can fail, a world.
#pragma once

#include <setjmp.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "address_space.h"
#include "host_vmm.h"
#include "mapper.h"

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__ 1
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define VATTN_TSAN 1
#else
#define VATTN_TSAN 0
#endif

// The tests fault on purpose, and handle it.
extern "C" inline __attribute__((used)) const char* __asan_default_options() { return "handle_segv=0"; }
extern "C" inline __attribute__((used)) const char* __tsan_default_options() { return "handle_segv=0"; }

namespace vattn {

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  std::size_t below(std::size_t n) { return static_cast<std::size_t>(engine_() % n); }
  bool one_in(std::size_t n) { return below(n) == 0; }

 private:
  std::mt19937_64 engine_;
};

inline sigjmp_buf fault_return;

// Whether touching memory the given way is a segmentation fault.
template <class Touch>
bool faults(Touch&& touch) {
  struct sigaction action{}, before{};
  action.sa_handler = [](int) { siglongjmp(fault_return, 1); };
  sigaction(SIGSEGV, &action, &before);
  volatile bool faulted = true;
  if (sigsetjmp(fault_return, 1) == 0) {
    touch();
    faulted = false;
  }
  sigaction(SIGSEGV, &before, nullptr);
  return faulted;
}

// One word of memory that changes behind the compiler's back: through other addresses, or not at all but by a fault.
struct Word {
  volatile std::uint64_t* at;
  operator std::uint64_t() const { return *at; }
  std::uint64_t operator=(std::uint64_t value) const { return *at = value, value; }
};
inline Word word(Address address) { return {reinterpret_cast<volatile std::uint64_t*>(address)}; }

inline bool read_faults(Address address) {
  return faults([=] { static_cast<void>(static_cast<std::uint64_t>(word(address))); });
}
inline bool write_faults(Address address) {
  return faults([=] { word(address) = 1; });
}

// Entries of the kernel's table of mappings that touch the range; of the whole process by default.
inline std::size_t kernel_entries(Address address = 0, std::size_t size = ~std::size_t{0}) {
  std::ifstream maps("/proc/self/maps");
  std::size_t entries = 0;
  for (std::string line; std::getline(maps, line);) {
    std::size_t dash = 0;
    const Address begin = std::stoull(line, &dash, 16);
    const Address end = std::stoull(line.substr(dash + 1), nullptr, 16);
    entries += begin < address + size && end > address;
  }
  return entries;
}

inline AllocationProp host_prop(int granularity_log2) {
  AllocationProp prop{};
  prop.type = 1;
  prop.location = {kLocationHost, granularity_log2};
  return prop;
}

// The host's table, whose calls ask `intercept` first: kSuccess lets them pass, anything else is their result. It may
// change only while no transaction is in the log, which is why the worker's set_context, at its start, does not ask.
inline std::function<Result(Call)> intercept;

template <Call kCall, auto kMember>
struct Intercepted;
template <Call kCall, class... Args, Result (*Vmm::*kMember)(Args...)>
struct Intercepted<kCall, kMember> {
  static Result call(Args... args) {
    if (const Result result = intercept ? intercept(kCall) : Result{kSuccess}; result != kSuccess) return result;
    return (host_vmm().*kMember)(args...);
  }
};

inline Vmm intercepted_vmm() {
  Vmm table = host_vmm();
  table.address_reserve = Intercepted<Call::kReserve, &Vmm::address_reserve>::call;
  table.address_free = Intercepted<Call::kFree, &Vmm::address_free>::call;
  table.create = Intercepted<Call::kCreate, &Vmm::create>::call;
  table.release = Intercepted<Call::kRelease, &Vmm::release>::call;
  table.map = Intercepted<Call::kMap, &Vmm::map>::call;
  table.unmap = Intercepted<Call::kUnmap, &Vmm::unmap>::call;
  table.set_access = Intercepted<Call::kSetAccess, &Vmm::set_access>::call;
  table.memset_async = Intercepted<Call::kMemset, &Vmm::memset_async>::call;
  table.event_record = Intercepted<Call::kEventRecord, &Vmm::event_record>::call;
  table.event_synchronize = Intercepted<Call::kEventSynchronize, &Vmm::event_synchronize>::call;
  return table;
}

// While it lives, the intercepted table's calls are asked about.
struct Interception {
  explicit Interception(std::function<Result(Call)> ask) { intercept = std::move(ask); }
  ~Interception() { intercept = nullptr; }
};

inline std::size_t release_free(PagePool& pool, Transaction& transaction, std::size_t count) {
  const std::vector<PageId> pages = pool.remove_free(count);
  if (pages.empty()) return 0;
  transaction.add({Operation::Kind::kRelease, pages});
  transaction.on_revert([&pool, pages] { pool.undo_remove_free(pages); });
  return pages.size();
}

// Attaches columns [columns(slot), upto) of `source`: the same physical pages, at the same place in their slot.
inline void alias(AddressSpace& space, Transaction& transaction, std::size_t slot, std::size_t source, std::size_t upto,
                  Access access) {
  space.attach(transaction, slot, space.pages(source, std::min(space.columns(slot), upto), upto), access);
}

// The failures, with the log going on.
inline std::vector<std::shared_ptr<Transaction>> take_failures(Mapper& mapper) {
  auto failures = mapper.failures();
  mapper.resume();
  return failures;
}

// One pool, one space over it, and their mapper.
struct World {
  explicit World(const AddressSpace::Shape& shape, std::size_t budget, const Vmm& table = host_vmm(),
                 int granularity_log2 = 12, bool zero_on_free = false)
      : driver(std::make_shared<Driver>(table, host_prop(granularity_log2), nullptr, 0, kMapRestore)),
        pool(std::make_shared<PagePool>(std::size_t{1} << granularity_log2, budget, zero_on_free)),
        space(std::make_shared<AddressSpace>(driver, pool, shape)),
        mapper(std::make_unique<Mapper>(driver, pool)) {}

  using Decide = std::function<void(Transaction&)>;
  std::shared_ptr<Transaction> submit(const Decide& decide) {
    auto transaction = std::make_shared<Transaction>();
    decide(*transaction);
    mapper->submit(transaction);
    return transaction;
  }
  Status run(const Decide& decide) {
    const auto transaction = submit(decide);
    mapper->wait(transaction->ticket());
    return transaction->status();
  }
  Status grow(std::size_t slot, std::size_t count) {
    return run([&](Transaction& t) { space->grow(t, slot, count); });
  }
  Status shrink(std::size_t slot, std::size_t count) {
    return run([&](Transaction& t) { space->shrink(t, slot, count); });
  }
  Status alias(std::size_t slot, std::size_t source, std::size_t upto, Access access) {
    return run([&](Transaction& t) { vattn::alias(*space, t, slot, source, upto, access); });
  }
  // Unmaps everything and gives the memory back.
  Status clear() {
    return run([&](Transaction& t) {
      for (std::size_t slot = 0; slot < space->shape().slots; ++slot) {
        space->shrink(t, slot, space->columns(slot) - space->first(slot));
        space->place(t, slot, 0);
      }
      release_free(*pool, t, pool->counts().budget);
    });
  }

  // As address_space.h says it.
  Address at(std::size_t tensor, std::size_t slot, std::size_t run, std::size_t page) const {
    const AddressSpace::Shape& s = space->shape();
    return space->base(tensor) + ((slot * s.runs + run) * s.run_pages + page) * pool->page_size();
  }

  std::shared_ptr<Driver> driver;
  std::shared_ptr<PagePool> pool;
  std::shared_ptr<AddressSpace> space;
  std::unique_ptr<Mapper> mapper;
};

}  // namespace vattn
