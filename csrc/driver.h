// A provider's table together with what its calls need (context, allocation properties), counted and timed.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include "vmm.h"

namespace vattn {

enum class Call : unsigned { kReserve, kFree, kCreate, kRelease, kMap, kUnmap, kSetAccess, kSetContext };
constexpr std::size_t kCalls = 8;

const char* call_name(Call call);        // CUDA's: "cuMemCreate"
const char* result_name(Result result);  // CUDA's: "CUDA_ERROR_OUT_OF_MEMORY"

class DriverFailure : public std::runtime_error {
 public:
  DriverFailure(Call call, Result result);
  Call call;
  Result result;
};

struct CallStats {
  std::uint64_t count = 0;
  std::uint64_t nanoseconds = 0;
};

class Driver {
 public:
  // `reserve_flags` are passed to every address_reserve, `restore_flags` to a map that undoes an unmap.
  Driver(const Vmm& table, const AllocationProp& prop, void* context, Flags reserve_flags, Flags restore_flags)
      : table_(table), prop_(prop), context_(context), reserve_flags_(reserve_flags), restore_flags_(restore_flags) {}

  Result reserve(Address* address, std::size_t size, std::size_t alignment) {
    return counted(Call::kReserve, [&] { return table_.address_reserve(address, size, alignment, 0, reserve_flags_); });
  }
  Result free(Address address, std::size_t size) {
    return counted(Call::kFree, [&] { return table_.address_free(address, size); });
  }
  Result create(Handle* handle, std::size_t size) {
    return counted(Call::kCreate, [&] { return table_.create(handle, size, &prop_, 0); });
  }
  Result release(Handle handle) {
    return counted(Call::kRelease, [&] { return table_.release(handle); });
  }
  Result map(Address address, std::size_t size, Handle handle, bool restores) {
    const Flags flags = restores ? restore_flags_ : 0;
    return counted(Call::kMap, [&] { return table_.map(address, size, 0, handle, flags); });
  }
  Result unmap(Address address, std::size_t size) {
    return counted(Call::kUnmap, [&] { return table_.unmap(address, size); });
  }
  Result set_access(Address address, std::size_t size, Access access) {
    const AccessDesc desc{prop_.location, static_cast<unsigned>(access)};
    return counted(Call::kSetAccess, [&] { return table_.set_access(address, size, &desc, 1); });
  }
  Result set_context() {
    return counted(Call::kSetContext, [&] { return table_.set_context(context_); });
  }

  // What is mapped at an address, asked of the provider itself; for checks only, so not counted.
  bool mapped(Address address, Handle* handle, Access* access) const;

  CallStats stats(Call call) const;
  const Vmm& table() const { return table_; }

 private:
  template <class Body>
  Result counted(Call call, Body&& body) {
    const auto start = std::chrono::steady_clock::now();
    const Result result = body();
    const std::chrono::nanoseconds elapsed = std::chrono::steady_clock::now() - start;
    Counter& counter = counters_[static_cast<unsigned>(call)];
    counter.count.fetch_add(1, std::memory_order_relaxed);
    counter.nanoseconds.fetch_add(static_cast<std::uint64_t>(elapsed.count()), std::memory_order_relaxed);
    return result;
  }

  struct Counter {
    std::atomic<std::uint64_t> count{0};
    std::atomic<std::uint64_t> nanoseconds{0};
  };

  const Vmm table_;
  const AllocationProp prop_;
  void* const context_;
  const Flags reserve_flags_;
  const Flags restore_flags_;
  std::array<Counter, kCalls> counters_;
};

}  // namespace vattn
