// A provider's table together with what its calls need (context, allocation properties), counted and timed.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fork_guard.h"
#include "vmm.h"

namespace vattn {

enum class Call : unsigned {
  kReserve,
  kFree,
  kCreate,
  kRelease,
  kMap,
  kUnmap,
  kSetAccess,
  kSetContext,
  kCaptureMode,
  kEventCreate,
  kEventRecord,
  kEventQuery,
  kEventSynchronize,
  kContextSynchronize,
  kIsCapturing,
  kMemset,
};
constexpr std::size_t kCalls = 16;

const char* call_name(Call call);  // CUDA's: "cuMemCreate"

class DriverFailure : public std::runtime_error {
 public:
  DriverFailure(Call call, Result result, std::string name);
  Call call;
  Result result;
  std::string name;  // CUDA's: "CUDA_ERROR_OUT_OF_MEMORY"
};

struct CallStats {
  std::uint64_t count = 0;
  std::uint64_t nanoseconds = 0;
};

class Event;

class Driver : public std::enable_shared_from_this<Driver> {
 public:
  // `reserve_flags` are passed to every address_reserve, `restore_flags` to a map that undoes an unmap. `unmap_ranges`:
  // one unmap may take several neighbouring mappings. `read_only`: memory can be mapped read-only; otherwise such
  // mappings can be written. `streams`: those that may capture graphs, which exist as long as the driver. `peers`: who
  // has the access of the memory's own location as well.
  Driver(const Vmm& table, const AllocationProp& prop, void* context, Flags reserve_flags, Flags restore_flags,
         bool unmap_ranges = true, bool read_only = true, std::vector<StreamHandle> streams = {},
         const std::vector<Location>& peers = {})
      : table_(table),
        prop_(prop),
        locations_(with(prop.location, peers)),
        context_(context),
        reserve_flags_(reserve_flags),
        restore_flags_(restore_flags),
        unmap_ranges_(unmap_ranges),
        read_only_(read_only),
        streams_(std::move(streams)) {}
  ~Driver();
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  // The calls; on a thread that is the driver's own (attach), or inside a Scope.

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
    std::vector<AccessDesc> descs;
    for (const Location& location : locations_) descs.push_back({location, static_cast<unsigned>(granted(access))});
    return counted(Call::kSetAccess, [&] { return table_.set_access(address, size, descs.data(), descs.size()); });
  }
  // Waits for the event; for all work in the context where it is null. A capture is invalidated when its context is
  // synchronised, so while a stream captures the latter is not tried: kCaptureUnsupported. Which call failed is in
  // *call.
  Result synchronize(const Event* event, Call* call);
  // Zeroes a range that may be written, and waits until it is. Which call failed is in *call; *touched: something of
  // the range may be zero already.
  Result zero(Address address, std::size_t size, Call* call, bool* touched);

  bool unmap_ranges() const { return unmap_ranges_; }
  bool read_only() const { return read_only_; }
  // The access that a mapping has which was asked for with `access`.
  Access granted(Access access) const { return access == Access::kRead && !read_only_ ? Access::kReadWrite : access; }

  // Makes the calling thread the driver's own: its context is current there, and graphs that other threads capture do
  // not forbid it any call. Which call failed is in *call.
  Result attach(Call* call);

  // While it lives, the driver's context is current on the calling thread, which is somebody else's, and a graph that
  // is captured does not forbid the driver's calls.
  class Scope {
   public:
    explicit Scope(const Driver& driver);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const Driver& driver_;
    void* before_ = nullptr;
    unsigned mode_ = kCaptureRelaxed;
  };

  // Records an event on a stream. Throws DriverFailure.
  std::shared_ptr<Event> record(StreamHandle stream);
  // Whether the stream captures a graph, or cannot be used because another one does. Throws DriverFailure.
  bool capturing(StreamHandle stream);
  // Whether any stream captures a graph: one of the driver's streams, or one that the legacy default stream waits for,
  // which are all but those created as non-blocking. Throws DriverFailure.
  bool any_capturing();
  // Whether the provider maps memory read-only, for the peers too, tried on `size` bytes. Throws DriverFailure if it
  // cannot be tried, or cannot be mapped at all.
  bool try_read_only(std::size_t size);

  // What is mapped at an address, with an access that is the same for all locations, asked of the provider itself; for
  // checks only, so not counted.
  bool mapped(Address address, Handle* handle, Access* access);

  std::string result_name(Result result) const;
  DriverFailure failure(Call call, Result result) const { return {call, result, result_name(result)}; }

  CallStats stats(Call call) const;
  const Vmm& table() const { return table_; }

 private:
  friend class Event;

  static std::vector<Location> with(const Location& own, const std::vector<Location>& peers) {
    std::vector<Location> all{own};
    all.insert(all.end(), peers.begin(), peers.end());
    return all;
  }

  Result take_event(EventHandle* event);
  Result ask_capturing(StreamHandle stream, bool* captures);
  Result ask_any_capturing(bool* captures);

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
  const std::vector<Location> locations_;  // that have access: the memory's own, then its peers
  void* const context_;
  const Flags reserve_flags_;
  const Flags restore_flags_;
  const bool unmap_ranges_;
  const bool read_only_;
  const std::vector<StreamHandle> streams_;
  const ForkGuard fork_;
  std::array<Counter, kCalls> counters_;
  std::mutex stock_mutex_;
  std::vector<EventHandle> stock_;  // events that nobody has, for the next record
};

// What was launched on a stream up to a point. The provider's event goes back to the driver's stock with the last
// reference, whether it is complete or not.
class Event {
 public:
  Event(std::shared_ptr<Driver> driver, EventHandle handle) : driver_(std::move(driver)), handle_(handle) {}
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  // Whether it is complete. A provider that cannot say counts as not yet: whoever waits learns why.
  bool done() const;
  EventHandle handle() const { return handle_; }

 private:
  const std::shared_ptr<Driver> driver_;
  const EventHandle handle_;
};

}  // namespace vattn
