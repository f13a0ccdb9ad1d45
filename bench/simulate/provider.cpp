// The calls of csrc/vmm.h that make and map memory, without any: handles are numbers, mappings are forgotten at once.
// What a call would take on a real driver is added up instead. One thread, the worker of a pool, makes all of them.
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "vmm.h"

namespace {

using namespace vattn;

enum Priced { kCreate, kRelease, kMap, kUnmap, kSetAccess, kPriced };

std::uint64_t prices[kPriced];  // nanoseconds
std::size_t page_size = 1;
std::atomic<std::uint64_t> spent{0};
std::atomic<Handle> handles{0};

Result charged(Priced call, std::uint64_t times = 1) {
  spent.fetch_add(prices[call] * times, std::memory_order_relaxed);
  return kSuccess;
}

Result create(Handle* handle, std::size_t, const AllocationProp*, Flags) {
  *handle = ++handles;
  return charged(kCreate);
}
Result release(Handle) { return charged(kRelease); }
Result map(Address, std::size_t, std::size_t, Handle, Flags) { return charged(kMap); }
// CUDA's driver unmaps page by page.
Result unmap(Address, std::size_t size) { return charged(kUnmap, size / page_size); }
Result set_access(Address, std::size_t, const AccessDesc*, std::size_t) { return charged(kSetAccess); }

}  // namespace

extern "C" {

__attribute__((visibility("default"))) std::uint64_t simulate_spent() { return spent; }

__attribute__((visibility("default"))) void simulate_begin(std::size_t page, const std::uint64_t* nanoseconds) {
  page_size = page;
  for (int call = 0; call < kPriced; ++call) prices[call] = nanoseconds[call];
  spent = 0;
}

__attribute__((visibility("default"))) std::uintptr_t simulate_call(int call) {
  switch (call) {
    case kCreate:
      return reinterpret_cast<std::uintptr_t>(create);
    case kRelease:
      return reinterpret_cast<std::uintptr_t>(release);
    case kMap:
      return reinterpret_cast<std::uintptr_t>(map);
    case kUnmap:
      return reinterpret_cast<std::uintptr_t>(unmap);
    default:
      return reinterpret_cast<std::uintptr_t>(set_access);
  }
}
}
