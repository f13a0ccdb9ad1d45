// A libcuda.so.1 for tests on machines without a GPU: the calls that vattn's cuda driver and cuda-python make, over the
// host provider's memory. It is strict: what CUDA's documentation forbids is refused and noted as a violation, also
// where the real driver might let it pass. Streams are lists of kernels that a test launches and completes.
//
// Tests control it by the stub_* functions at the end of this file, through ctypes (stub.py).
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "host_vmm.h"

namespace {

using namespace vattn;

enum : Result {
  kDeinitialized = 4,
  kDeviceUnavailable = 46,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kIllegalAddress = 700,
  kLaunchTimeout = 702,
  kCaptureInvalidated = 901,
  kCapturedEvent = 907,
};

constexpr int kFresh = 0xA5;  // every byte of memory that nobody wrote yet

int environment(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value ? std::atoi(value) : otherwise;
}

struct Context {
  int device;
  std::size_t references = 0;  // of the primary context, by cuDevicePrimaryCtxRetain
  Result poison = kSuccess;    // what a kernel failed with; nothing but the end of the process removes it
};

struct Kernel {  // what a test launched; it reads a range, or reads and writes it, until it is completed
  std::size_t number;
  Address address;
  std::size_t size;
  bool writes;
  bool faulted = false;  // its pages were taken away while it ran; the host learns of it at its completion
  bool touches(Address at, std::size_t bytes) const { return address < at + bytes && at < address + size; }
};

struct Stream {
  Stream(Context* its, bool waits) : context(its), blocking(waits) {}
  Context* const context;
  const bool blocking;  // waits for the legacy stream and is waited for by it; torch's streams are not
  std::vector<Kernel> running;
  std::size_t launched = 0;  // kernels ever
  bool capturing = false;
  bool invalidated = false;  // the capture under way, by a call that it forbids
  unsigned mode = kCaptureGlobal;
  std::thread::id capturer;
  // Complete are all kernels before the first that runs.
  std::size_t completed() const { return running.empty() ? launched : running.front().number - 1; }
};

struct Event {
  explicit Event(Context* its) : context(its) {}
  Context* const context;
  Stream* stream = nullptr;                   // where it was recorded
  std::map<const Stream*, std::size_t> upto;  // kernels that it covers; of none where it was never recorded
  bool captured = false;
  std::size_t waiters = 0;
  bool complete() const {
    return std::all_of(upto.begin(), upto.end(), [](const auto& of) { return of.first->completed() >= of.second; });
  }
};

struct Mapping {
  std::size_t size;
  Handle handle;
  std::vector<unsigned> access;  // by device
};

struct Fault {
  std::string name;  // empty: any call
  std::size_t countdown;
  Result code;
};

constexpr std::size_t kMemory = std::size_t{1} << 30;
constexpr std::size_t kPooledStreams = 8;

struct State {
  std::mutex mutex;
  std::condition_variable completed;
  int pid = 0;  // that called cuInit; contexts do not survive a fork
  Result init_result = environment("STUB_CUDA_INIT", kSuccess);
  int version = environment("STUB_CUDA_VERSION", 13000);
  bool virtual_memory = environment("STUB_CUDA_VMM", 1);
  bool read_only = environment("STUB_CUDA_READ_ONLY", 1);
  bool posix_fd = environment("STUB_CUDA_POSIX_FD", 1);
  bool fabric = environment("STUB_CUDA_FABRIC", 0);
  bool imex = environment("STUB_CUDA_IMEX", 0);  // whether this process may use a channel, without which fabric fails
  bool peers = environment("STUB_CUDA_PEERS", 1);
  int granularity_log2 = environment("STUB_CUDA_GRANULARITY_LOG2", 21);
  std::size_t memory = kMemory;
  std::vector<Context> contexts =
      std::vector<Context>(static_cast<std::size_t>(environment("STUB_CUDA_DEVICES", 1)), Context{0});
  std::map<Address, std::size_t> reservations;
  std::map<Address, Mapping> mappings;
  std::map<Handle, std::pair<std::size_t, std::size_t>> handles;  // size, references
  std::map<Handle, unsigned> handle_types;                        // that were requested, of every handle ever
  std::set<Event*> events;
  std::set<Stream*> streams;
  std::vector<Stream*> default_streams;
  std::vector<Stream*> per_thread_streams;  // one per device: nothing is launched on them
  // Per device, those that do not block: as torch's, they come in turn, and exist as long as the process.
  std::vector<std::vector<Stream*>> pools;
  std::size_t pooled = 0;  // given out
  std::map<std::string, std::size_t> calls;
  std::map<std::string, std::size_t> latencies;  // microseconds
  std::vector<Fault> faults;
  std::vector<std::string> log;
  std::vector<std::string> violations;
  bool logging = false;
  bool gone = false;  // the driver has ended, as it does when the process exits
  bool locking = false;
  std::mutex driver;  // if locking: what a call takes its time under, and what a launch needs
  std::string held;   // calls of this name wait until it is another
  std::size_t holding = 0;
  std::condition_variable released;
  std::map<std::string, std::size_t> stalls;  // calls, and launches, that found the driver locked

  State() {
    for (std::size_t i = 0; i < contexts.size(); ++i) {
      contexts[i].device = static_cast<int>(i);
      default_streams.push_back(new Stream(&contexts[i], true));
      per_thread_streams.push_back(new Stream(&contexts[i], true));
      pools.emplace_back();
      for (std::size_t n = 0; n < kPooledStreams; ++n)
        streams.insert(pools[i].emplace_back(new Stream(&contexts[i], false)));
    }
  }
  std::size_t granularity() const { return std::size_t{1} << granularity_log2; }
};

State& state() {
  static State* the = new State;  // never destroyed: worker threads may outlive static objects
  return *the;
}

// The driver of a process that exits ends before the objects of libraries that were loaded earlier.
[[maybe_unused]] const int at_exit = std::atexit([] {
  const std::lock_guard lock(state().mutex);
  state().gone = true;
});

thread_local Context* current = nullptr;
thread_local unsigned capture_mode = kCaptureGlobal;

// Takes the driver's lock, if there is one to take, and counts where another call has it.
void enter_driver(std::unique_lock<std::mutex>& driver, const char* name) {
  if (!driver.mutex() || driver.try_lock()) return;
  {
    const std::lock_guard lock(state().mutex);
    state().stalls[name] += 1;
  }
  driver.lock();
}

// The frame of a call: counts, logs, delays and fails it as the test asked; holds the lock from then on.
class Frame {
 public:
  template <class... Args>
  explicit Frame(const char* name, const Args&... args) : name_(name) {
    State& s = state();
    std::size_t latency = 0;
    std::unique_lock<std::mutex> driver;
    {
      const std::lock_guard held(s.mutex);
      s.calls[name] += 1;
      if (s.logging) {
        std::ostringstream line;
        line << name;
        (void)std::initializer_list<int>{((line << ' ' << args), 0)...};
        s.log.push_back(line.str());
      }
      if (const auto it = s.latencies.find(name); it != s.latencies.end()) latency = it->second;
      if (s.locking) driver = std::unique_lock(s.driver, std::defer_lock);
      for (auto fault = s.faults.begin(); fault != s.faults.end(); ++fault)
        if ((fault->name.empty() || fault->name == name) && --fault->countdown == 0) {
          result = fault->code;
          s.faults.erase(fault);
          break;
        }
    }
    enter_driver(driver, name);
    if (latency) std::this_thread::sleep_for(std::chrono::microseconds(latency));
    lock = std::unique_lock(s.mutex);
    s.holding += 1;
    s.released.wait(lock, [&] { return s.held != name; });
    s.holding -= 1;
    if (s.gone) result = kDeinitialized;
    if (result == kSuccess && s.pid != getpid()) refuse(kNotInitialized, "CUDA is not initialised in this process");
  }

  bool failed() const { return result != kSuccess; }

  // Notes what the documentation forbids, but the driver does not refuse.
  void note(const std::string& why) { state().violations.push_back(std::string(name_) + ": " + why); }

  // A precondition does not hold: notes it.
  Result refuse(Result code, const std::string& why) {
    note(why);
    return result = code;
  }

  bool needs(bool condition, const char* why, Result code = kInvalidValue) {
    if (!condition && !failed()) refuse(code, why);
    return condition;
  }

  // A kernel that failed fails every later call in its context.
  bool needs_context() {
    if (failed()) return false;
    if (!current) return refuse(kInvalidContext, "no context is current on the calling thread"), false;
    return (result = current->poison) == kSuccess;
  }

  // Which calls a capture forbids, the documentation leaves open but for examples. Strictly: all of these. A call that
  // is forbidden fails, and invalidates the capture.
  bool needs_no_capture() {
    for (Stream* stream : state().streams) {
      if (!stream->capturing || stream->mode == kCaptureRelaxed || capture_mode == kCaptureRelaxed) continue;
      const bool mine = stream->capturer == std::this_thread::get_id();
      if (!mine && (stream->mode != kCaptureGlobal || capture_mode != kCaptureGlobal)) continue;
      stream->invalidated = true;
      refuse(kCaptureUnsupported, "a graph is being captured, and the thread's mode is not relaxed");
    }
    return !failed();
  }

  Result result = kSuccess;
  std::unique_lock<std::mutex> lock;

 private:
  const char* const name_;
};

#define ENTER(...)         \
  Frame call(__VA_ARGS__); \
  State& s = state();      \
  (void)s;                 \
  if (call.failed()) return call.result
#define ENTER_CONTEXT(...) \
  ENTER(__VA_ARGS__);      \
  if (!call.needs_context()) return call.result
// For what a capture may forbid.
#define ENTER_UNSAFE(...)     \
  ENTER_CONTEXT(__VA_ARGS__); \
  if (!call.needs_no_capture()) return call.result
#define NEEDS(...) \
  if (!call.needs(__VA_ARGS__)) return call.result

AllocationProp host_allocation(int granularity_log2, unsigned handle_types = 0) {
  AllocationProp prop{};
  prop.type = 1;
  prop.requested_handle_types = handle_types & kPosixFileDescriptor;
  prop.location = {kLocationHost, granularity_log2};
  return prop;
}

Stream* find_stream(const State& s, StreamHandle handle) {
  if (!handle) return current ? s.default_streams[static_cast<std::size_t>(current->device)] : nullptr;
  if (handle == per_thread_stream())
    return current ? s.per_thread_streams[static_cast<std::size_t>(current->device)] : nullptr;
  auto* stream = reinterpret_cast<Stream*>(handle);
  return s.streams.contains(stream) ? stream : nullptr;
}

// Streams that capture and that the legacy stream, if this is it, would have to wait for.
std::vector<Stream*> implicitly_captured(const State& s, StreamHandle handle) {
  std::vector<Stream*> found;
  for (Stream* stream : s.streams)
    if (!handle && stream->capturing && stream->blocking && stream->context == current) found.push_back(stream);
  return found;
}

// What runs before anything that is launched on a stream now.
std::map<const Stream*, std::size_t> before(const State& s, const Stream* stream) {
  std::map<const Stream*, std::size_t> covered{{stream, stream->launched}};
  const Stream* legacy = s.default_streams[static_cast<std::size_t>(stream->context->device)];
  if (stream->blocking) covered[legacy] = legacy->launched;
  if (stream == legacy)
    for (const Stream* other : s.streams)
      if (other->blocking && other->context == stream->context) covered[other] = other->launched;
  return covered;
}

// The mappings that a range consists of; false where it does not, or has gaps.
bool whole_mappings(State& s, Address address, std::size_t size, std::vector<Mapping*>* found) {
  Address reached = address;
  for (auto it = s.mappings.find(address); it != s.mappings.end() && reached < address + size; ++it) {
    if (it->first != reached) return false;
    reached += it->second.size;
    found->push_back(&it->second);
  }
  return size > 0 && reached == address + size;
}

const Mapping* mapping_at(const State& s, Address address) {
  auto it = s.mappings.upper_bound(address);
  if (it == s.mappings.begin()) return nullptr;
  --it;
  return address < it->first + it->second.size ? &it->second : nullptr;
}

// Calls a function for every kernel that runs, with its stream.
template <class Body>
void for_running(State& s, Body&& body) {
  for (const auto* streams : {&s.default_streams, &s.per_thread_streams})
    for (Stream* stream : *streams)
      for (Kernel& kernel : stream->running) body(*stream, kernel);
  for (Stream* stream : s.streams)
    for (Kernel& kernel : stream->running) body(*stream, kernel);
}

// Whether all of a kernel's range is mapped, with the access that it needs on its stream's device.
bool is_accessible(const State& s, const Stream& stream, const Kernel& kernel) {
  const auto device = static_cast<std::size_t>(stream.context->device);
  Address reached = kernel.address;
  while (reached < kernel.address + kernel.size) {
    auto it = s.mappings.upper_bound(reached);
    if (it == s.mappings.begin()) return false;
    --it;
    if (reached >= it->first + it->second.size || it->second.access[device] < (kernel.writes ? 3u : 1u)) return false;
    reached = it->first + it->second.size;
  }
  return true;
}

// The first kernel in a context that fails ends all work in it, and every call there fails from then on.
void poison(State& s, Context* context) {
  context->poison = kIllegalAddress;
  const auto stop = [&](Stream* stream) {
    if (stream->context == context) stream->running.clear();
  };
  std::for_each(s.streams.begin(), s.streams.end(), stop);
  std::for_each(s.default_streams.begin(), s.default_streams.end(), stop);
}

// Overwrites new memory, by a mapping that exists for as long as that takes.
Result fill(Handle handle, std::size_t size, const Location& location) {
  const Vmm& vmm = host_vmm();
  const AccessDesc desc{location, 3};
  Address address = 0;
  Result result = vmm.address_reserve(&address, size, 0, 0, 0);
  if (result != kSuccess) return result;
  result = vmm.map(address, size, 0, handle, 0);
  if (result == kSuccess) {
    result = vmm.set_access(address, size, &desc, 1);
    if (result == kSuccess) std::memset(reinterpret_cast<void*>(address), kFresh, size);
    vmm.unmap(address, size);
  }
  vmm.address_free(address, size);
  return result;
}

// Waits until kernels are completed; not for ever, so that a test that fails ends.
template <class Done>
Result wait(Frame& call, Done&& done) {
  if (state().completed.wait_for(call.lock, std::chrono::seconds(10), done)) return current->poison;
  return call.refuse(kLaunchTimeout, "the test completes none of the kernels that this waits for");
}

std::size_t physical_bytes() { return host_usage().physical_bytes; }

thread_local std::string answer;

const char* joined(const std::vector<std::string>& lines) {
  answer.clear();
  for (const std::string& line : lines) answer += line + '\n';
  return answer.c_str();
}

}  // namespace

// Only these are seen from outside: the host provider in here must not be taken for the one of the native module.
#pragma GCC visibility push(default)
extern "C" {

// Devices and contexts

Result cuInit(unsigned flags) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.calls["cuInit"] += 1;
  if (flags != 0) return kInvalidValue;
  if (s.gone) return kDeinitialized;
  if (s.pid && s.pid != getpid()) return kNotInitialized;
  if (s.init_result != kSuccess) return s.init_result;
  if (s.contexts.empty()) return kNoDevice;
  s.pid = getpid();
  return kSuccess;
}

Result cuDriverGetVersion(int* version) {
  *version = state().version;
  return kSuccess;
}

Result cuDeviceGetCount(int* count) {
  ENTER("cuDeviceGetCount");
  *count = static_cast<int>(s.contexts.size());
  return kSuccess;
}

Result cuDeviceGet(int* device, int ordinal) {
  ENTER("cuDeviceGet", ordinal);
  NEEDS(ordinal >= 0 && ordinal < static_cast<int>(s.contexts.size()), "no such device", kInvalidDevice);
  *device = ordinal;
  return kSuccess;
}

Result cuDeviceGetName(char* name, int size, int device) {
  ENTER("cuDeviceGetName", device);
  std::strncpy(name, ("Stub GPU " + std::to_string(device)).c_str(), static_cast<std::size_t>(size) - 1);
  name[size - 1] = 0;
  return kSuccess;
}

Result cuDeviceTotalMem_v2(std::size_t* bytes, int device) {
  ENTER("cuDeviceTotalMem", device);
  *bytes = s.memory;
  return kSuccess;
}

Result cuDeviceGetAttribute(int* value, int attribute, int device) {
  ENTER("cuDeviceGetAttribute", attribute, device);
  constexpr int kVirtualMemoryManagementSupported = 102, kPosixSupported = 103, kFabricSupported = 128;
  *value = (attribute == kVirtualMemoryManagementSupported && s.virtual_memory) ||
           (attribute == kPosixSupported && s.posix_fd) || (attribute == kFabricSupported && s.fabric);
  return kSuccess;
}

Result cuDeviceCanAccessPeer(int* can, int device, int peer) {
  ENTER("cuDeviceCanAccessPeer", device, peer);
  for (const int one : {device, peer})
    NEEDS(one >= 0 && one < static_cast<int>(s.contexts.size()), "no such device", kInvalidDevice);
  *can = s.peers && device != peer;
  return kSuccess;
}

Result cuDevicePrimaryCtxRetain(Context** context, int device) {
  ENTER("cuDevicePrimaryCtxRetain", device);
  *context = &s.contexts[static_cast<std::size_t>(device)];
  (*context)->references += 1;
  return kSuccess;
}

Result cuDevicePrimaryCtxRelease_v2(int device) {
  ENTER("cuDevicePrimaryCtxRelease", device);
  Context& context = s.contexts[static_cast<std::size_t>(device)];
  NEEDS(context.references > 0, "released more often than retained", kInvalidContext);
  context.references -= 1;
  return kSuccess;
}

Result cuCtxSetCurrent(Context* context) {
  ENTER("cuCtxSetCurrent", context);
  const bool known = !context || (context >= s.contexts.data() && context < s.contexts.data() + s.contexts.size());
  NEEDS(known && (!context || context->references), "not a context that is retained", kInvalidContext);
  current = context;
  return kSuccess;
}

Result cuCtxGetCurrent(Context** context) {
  ENTER("cuCtxGetCurrent");
  *context = current;
  return kSuccess;
}

Result cuCtxSynchronize() {
  ENTER_CONTEXT("cuCtxSynchronize");
  for (Stream* stream : s.streams)
    if (stream->capturing && stream->context == current) {
      stream->invalidated = true;
      call.refuse(kCaptureUnsupported, "a stream of the context captures");
    }
  if (call.failed()) return call.result;
  return wait(call, [&, context = current] {
    const auto idle = [&](const Stream* stream) { return stream->context != context || stream->running.empty(); };
    return std::all_of(s.streams.begin(), s.streams.end(), idle) &&
           std::all_of(s.default_streams.begin(), s.default_streams.end(), idle);
  });
}

Result cuThreadExchangeStreamCaptureMode(unsigned* mode) {
  ENTER_CONTEXT("cuThreadExchangeStreamCaptureMode", *mode);
  NEEDS(*mode <= kCaptureRelaxed, "no such mode");
  std::swap(*mode, capture_mode);
  return kSuccess;
}

// Memory

Result cuMemGetInfo_v2(std::size_t* free, std::size_t* total) {
  ENTER_UNSAFE("cuMemGetInfo");
  *total = s.memory;
  *free = s.memory - std::min(s.memory, physical_bytes());
  return kSuccess;
}

Result cuMemGetAllocationGranularity(std::size_t* granularity, const AllocationProp* prop, unsigned) {
  ENTER("cuMemGetAllocationGranularity");
  NEEDS(prop && prop->type == 1 && prop->location.type == kLocationDevice, "only pinned memory of a device");
  *granularity = s.granularity();
  return kSuccess;
}

Result cuMemAddressReserve(Address* address, std::size_t size, std::size_t alignment, Address hint, Flags flags) {
  ENTER_UNSAFE("cuMemAddressReserve", size, alignment, hint, flags);
  NEEDS(flags == 0, "flags must be zero");
  NEEDS(size > 0 && size % 4096 == 0, "the size must be a multiple of the host page size");
  NEEDS((alignment & (alignment - 1)) == 0, "the alignment must be a power of two or zero");
  NEEDS(hint % 4096 == 0, "the address must be a multiple of the host page size");
  const Result result = host_vmm().address_reserve(address, size, std::max(alignment, s.granularity()), 0, 0);
  if (result == kSuccess) s.reservations.emplace(*address, size);
  return result;
}

Result cuMemAddressFree(Address address, std::size_t size) {
  ENTER_UNSAFE("cuMemAddressFree", address, size);
  const auto it = s.reservations.find(address);
  NEEDS(it != s.reservations.end() && it->second == size, "not exactly what cuMemAddressReserve returned");
  const auto first = s.mappings.lower_bound(address);
  NEEDS(first == s.mappings.end() || first->first >= address + size, "something is mapped there");
  s.reservations.erase(it);
  return host_vmm().address_free(address, size);
}

Result cuMemCreate(Handle* handle, std::size_t size, const AllocationProp* prop, Flags flags) {
  ENTER_UNSAFE("cuMemCreate", size, flags);
  NEEDS(flags == 0, "flags must be zero");
  NEEDS(size > 0 && size % s.granularity() == 0, "the size must be a multiple of the granularity");
  NEEDS(prop && prop->type == 1 && prop->location.type == kLocationDevice, "only pinned memory of a device");
  NEEDS(prop->location.id >= 0 && prop->location.id < static_cast<int>(s.contexts.size()), "no such device",
        kInvalidDevice);
  const unsigned types = prop->requested_handle_types;
  NEEDS((types & ~(kPosixFileDescriptor | kFabric)) == 0 && !prop->win32_handle_metadata, "no handles of Windows");
  if (((types & kPosixFileDescriptor) && !s.posix_fd) || ((types & kFabric) && !s.fabric)) return kNotSupported;
  if ((types & kFabric) && !s.imex) return kNotPermitted;
  const char zero[8] = {};
  NEEDS(std::memcmp(&prop->alloc_flags, zero, sizeof zero) == 0, "no allocation flags");
  if (physical_bytes() + size > s.memory) return kOutOfMemory;
  const AllocationProp allocation = host_allocation(s.granularity_log2, types);
  const Result result = host_vmm().create(handle, size, &allocation, 0);
  if (result != kSuccess) return result;
  if (const Result filled = fill(*handle, size, allocation.location); filled != kSuccess) {
    host_vmm().release(*handle);
    return filled;
  }
  s.handles.emplace(*handle, std::pair{size, std::size_t{1}});
  s.handle_types[*handle] = types;
  return kSuccess;
}

Result cuMemRelease(Handle handle) {
  ENTER_UNSAFE("cuMemRelease", handle);
  const auto it = s.handles.find(handle);
  NEEDS(it != s.handles.end(), "not a valid handle: the behaviour is undefined");
  if (--it->second.second == 0) s.handles.erase(it);
  return host_vmm().release(handle);
}

Result cuMemMap(Address address, std::size_t size, std::size_t offset, Handle handle, Flags flags) {
  ENTER_UNSAFE("cuMemMap", address, size, offset, handle, flags);
  NEEDS(flags == 0, "flags must be zero");
  NEEDS(offset == 0, "the offset must be zero");
  const auto physical = s.handles.find(handle);
  NEEDS(physical != s.handles.end(), "not a valid handle");
  NEEDS(address % s.granularity() == 0 && size % s.granularity() == 0, "not a multiple of the granularity");
  NEEDS(size > 0 && size == physical->second.first, "the size must be the allocation's");
  auto reservation = s.reservations.upper_bound(address);
  const bool reserved =
      reservation != s.reservations.begin() &&
      (--reservation, address + size <= reservation->first + reservation->second && address >= reservation->first);
  NEEDS(reserved, "not within one reservation");
  const auto next = s.mappings.lower_bound(address);
  const bool taken = mapping_at(s, address) || (next != s.mappings.end() && next->first < address + size);
  NEEDS(!taken, "something is mapped there", kAlreadyMapped);
  const Result result = host_vmm().map(address, size, 0, handle, 0);
  if (result == kSuccess) s.mappings.emplace(address, Mapping{size, handle, std::vector<unsigned>(s.contexts.size())});
  return result;
}

Result cuMemUnmap(Address address, std::size_t size) {
  ENTER_UNSAFE("cuMemUnmap", address, size);
  const auto it = s.mappings.find(address);
  NEEDS(it != s.mappings.end(), "nothing is mapped at this address");
  NEEDS(it->second.size == size, "not the entire range of one mapping");
  for_running(s, [&](Stream&, Kernel& kernel) {
    if (!kernel.touches(address, size)) return;
    kernel.faulted = true;
    call.note("a kernel that is running uses these pages");
  });
  const Result result = host_vmm().unmap(address, size);
  if (result == kSuccess) s.mappings.erase(it);
  return result;
}

Result cuMemSetAccess(Address address, std::size_t size, const AccessDesc* descs, std::size_t count) {
  ENTER_UNSAFE("cuMemSetAccess", address, size);
  NEEDS(descs && count > 0, "at least one descriptor");
  std::vector<Mapping*> mappings;
  NEEDS(whole_mappings(s, address, size, &mappings), "the range must be fully mapped, in whole mappings");
  std::vector<unsigned> access = mappings.front()->access;
  std::set<int> devices;
  for (const AccessDesc* desc = descs; desc < descs + count; ++desc) {
    const Location& location = desc->location;
    NEEDS(location.type == kLocationDevice && location.id >= 0 && location.id < static_cast<int>(s.contexts.size()),
          "no such device", kInvalidDevice);
    NEEDS(desc->flags == 0 || desc->flags == 1 || desc->flags == 3, "no such access");
    NEEDS(devices.insert(location.id).second, "a device twice");
    NEEDS(s.peers || location.id == current->device, "a device that cannot access the memory");
    if (desc->flags == 1 && !s.read_only) return kNotSupported;
    access[static_cast<std::size_t>(location.id)] = desc->flags;
  }
  // The host has one access for all devices: the most that one of them has.
  const AccessDesc desc{{kLocationHost, s.granularity_log2}, *std::max_element(access.begin(), access.end())};
  const Result result = host_vmm().set_access(address, size, &desc, 1);
  if (result == kSuccess)
    for (Mapping* mapping : mappings) mapping->access = access;
  for_running(s, [&](Stream& stream, Kernel& kernel) {
    if (result != kSuccess || !kernel.touches(address, size) || is_accessible(s, stream, kernel)) return;
    kernel.faulted = true;
    call.note("a kernel that is running needs more access to these pages");
  });
  return result;
}

Result cuMemGetAccess(Flags* flags, const Location* location, Address address) {
  ENTER_UNSAFE("cuMemGetAccess", address);
  NEEDS(flags && location && location->type == kLocationDevice && location->id >= 0 &&
            location->id < static_cast<int>(s.contexts.size()),
        "no such location");
  const Mapping* mapping = mapping_at(s, address);
  NEEDS(mapping, "nothing is mapped at this address");
  *flags = mapping->access[static_cast<std::size_t>(location->id)];
  return kSuccess;
}

// "If the address requested is not mapped, the function will fail": asking is no violation.
Result cuMemRetainAllocationHandle(Handle* handle, void* address) {
  ENTER_UNSAFE("cuMemRetainAllocationHandle", address);
  const Result result = host_vmm().retain_handle(handle, address);
  if (result == kSuccess) {
    const auto size = mapping_at(s, reinterpret_cast<Address>(address))->size;
    s.handles.try_emplace(*handle, std::pair{size, std::size_t{0}}).first->second.second += 1;
  }
  return result;
}

Result cuMemExportToShareableHandle(void* shareable, Handle handle, unsigned type, Flags flags) {
  ENTER_UNSAFE("cuMemExportToShareableHandle", handle, type, flags);
  NEEDS(flags == 0, "flags must be zero");
  NEEDS(s.handles.contains(handle), "not a valid handle");
  NEEDS(type == kPosixFileDescriptor && (s.handle_types[handle] & type), "the memory was made without such handles");
  return host_vmm().export_handle(shareable, handle, type, flags);
}

Result cuMemImportFromShareableHandle(Handle* handle, void* shareable, unsigned type) {
  ENTER_UNSAFE("cuMemImportFromShareableHandle", shareable, type);
  NEEDS(type == kPosixFileDescriptor, "only file descriptors");
  struct stat file{};
  if (fstat(static_cast<int>(reinterpret_cast<std::uintptr_t>(shareable)), &file) != 0) return kInvalidValue;
  const Result result = host_vmm().import_handle(handle, shareable, type);
  if (result != kSuccess) return result;
  s.handles.emplace(*handle, std::pair{static_cast<std::size_t>(file.st_size), std::size_t{1}});
  s.handle_types[*handle] = 0;  // it cannot be exported
  return kSuccess;
}

Result cuMemsetD8Async(Address address, unsigned char value, std::size_t size, StreamHandle handle) {
  ENTER_UNSAFE("cuMemsetD8Async", address, size, handle);
  NEEDS(find_stream(s, handle), "no such stream");
  NEEDS(handle == per_thread_stream(), "the stub orders no writes among kernels");
  std::vector<Mapping*> mappings;
  NEEDS(whole_mappings(s, address, size, &mappings), "the range must be fully mapped, in whole mappings");
  NEEDS(std::all_of(
            mappings.begin(), mappings.end(),
            [](const Mapping* mapping) { return mapping->access[static_cast<std::size_t>(current->device)] == 3; }),
        "the range must be writable", kIllegalAddress);
  const auto ordered = before(s, find_stream(s, handle));
  for_running(s, [&](Stream& stream, Kernel& kernel) {
    if (ordered.contains(&stream)) return;
    for (const auto& [at, mapping] : s.mappings)
      if (kernel.touches(at, mapping.size) &&
          std::any_of(mappings.begin(), mappings.end(), [&](const Mapping* m) { return m->handle == mapping.handle; }))
        call.note("a kernel that is running, and that nothing orders before this, uses this memory");
  });
  return host_vmm().memset_async(address, value, size, handle);
}

// Streams and events

Result cuStreamIsCapturing(StreamHandle handle, unsigned* status) {
  ENTER_CONTEXT("cuStreamIsCapturing", handle);
  const Stream* stream = find_stream(s, handle);
  NEEDS(stream, "no such stream");
  if (!implicitly_captured(s, handle).empty()) return kCaptureImplicit;  // documented not to invalidate the capture
  *status = !stream->capturing ? 0 : stream->invalidated ? 2 : 1;
  return kSuccess;
}

Result cuEventCreate(Event** event, unsigned flags) {
  ENTER_CONTEXT("cuEventCreate", flags);
  NEEDS(flags < 4, "unknown flags");
  *event = new Event{current};
  s.events.insert(*event);
  return kSuccess;
}

Result cuEventDestroy_v2(Event* event) {
  ENTER_CONTEXT("cuEventDestroy", event);
  NEEDS(s.events.contains(event), "no such event", kInvalidHandle);
  NEEDS(event->waiters == 0, "a thread waits for the event", kInvalidHandle);
  s.events.erase(event);
  delete event;
  return kSuccess;
}

Result cuEventRecord(Event* event, StreamHandle handle) {
  ENTER_CONTEXT("cuEventRecord", event, handle);
  Stream* stream = find_stream(s, handle);
  NEEDS(s.events.contains(event) && stream, "no such event or stream", kInvalidHandle);
  NEEDS(current == event->context && stream->context == event->context, "of different contexts", kInvalidHandle);
  for (Stream* captured : implicitly_captured(s, handle)) {
    captured->invalidated = true;
    call.refuse(kCaptureImplicit, "the legacy stream depends on one that captures");
  }
  if (call.failed()) return call.result;
  if (stream->invalidated) return kCaptureInvalidated;
  NEEDS(event->waiters == 0, "a thread waits for the event", kInvalidHandle);
  event->captured = stream->capturing;
  event->stream = stream;
  event->upto = before(s, stream);
  return kSuccess;
}

Result cuEventQuery(Event* event) {
  ENTER_UNSAFE("cuEventQuery", event);
  NEEDS(s.events.contains(event), "no such event", kInvalidHandle);
  if (event->captured) {
    event->stream->invalidated = event->stream->capturing;
    return call.refuse(kCapturedEvent, "the event is part of a graph");
  }
  return event->complete() ? kSuccess : kNotReady;
}

Result cuEventSynchronize(Event* event) {
  ENTER_UNSAFE("cuEventSynchronize", event);
  NEEDS(s.events.contains(event), "no such event", kInvalidHandle);
  if (event->captured) {
    event->stream->invalidated = event->stream->capturing;
    return call.refuse(kCapturedEvent, "the event is part of a graph");
  }
  event->waiters += 1;
  const Result result = wait(call, [&] { return event->complete(); });
  event->waiters -= 1;
  return result;
}

// Names

Result cuGetErrorName(Result result, const char** name) {
  if (state().gone) return kDeinitialized;
  if (host_vmm().error_name(result, name) == kSuccess) return kSuccess;
  static const std::map<Result, const char*> names{{kDeinitialized, "CUDA_ERROR_DEINITIALIZED"},
                                                   {kDeviceUnavailable, "CUDA_ERROR_DEVICE_UNAVAILABLE"},
                                                   {kNoDevice, "CUDA_ERROR_NO_DEVICE"},
                                                   {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
                                                   {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS"},
                                                   {kCaptureInvalidated, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
                                                   {kCapturedEvent, "CUDA_ERROR_CAPTURED_EVENT"}};
  const auto it = names.find(result);
  *name = it == names.end() ? nullptr : it->second;
  return it == names.end() ? kInvalidValue : kSuccess;
}

Result cuGetErrorString(Result result, const char** text) { return cuGetErrorName(result, text); }

Result cuGetProcAddress_v2(const char* symbol, void** function, int version, Flags flags, unsigned* status) {
  struct Entry {
    const char* name;
    int since;  // the CUDA that brought this function, in the version of it that is here
    void* function;
  };
#define ENTRY(name, since) {#name, since, reinterpret_cast<void*>(name)}
#define ENTRY_V2(name, since)                        \
  {                                                  \
    #name, since, reinterpret_cast<void*>(name##_v2) \
  }
  static const Entry entries[] = {
      ENTRY(cuInit, 2000),
      ENTRY(cuDriverGetVersion, 2020),
      ENTRY(cuDeviceGetCount, 2000),
      ENTRY(cuDeviceGet, 2000),
      ENTRY(cuDeviceGetName, 2000),
      ENTRY_V2(cuDeviceTotalMem, 3020),
      ENTRY(cuDeviceGetAttribute, 2000),
      ENTRY(cuDeviceCanAccessPeer, 4000),
      ENTRY(cuDevicePrimaryCtxRetain, 7000),
      ENTRY_V2(cuDevicePrimaryCtxRelease, 11000),
      ENTRY(cuCtxSetCurrent, 4000),
      ENTRY(cuCtxGetCurrent, 4000),
      ENTRY(cuCtxSynchronize, 2000),
      ENTRY(cuThreadExchangeStreamCaptureMode, 10010),
      ENTRY_V2(cuMemGetInfo, 3020),
      ENTRY(cuMemGetAllocationGranularity, 10020),
      ENTRY(cuMemAddressReserve, 10020),
      ENTRY(cuMemAddressFree, 10020),
      ENTRY(cuMemCreate, 10020),
      ENTRY(cuMemRelease, 10020),
      ENTRY(cuMemMap, 10020),
      ENTRY(cuMemUnmap, 10020),
      ENTRY(cuMemSetAccess, 10020),
      ENTRY(cuMemGetAccess, 10020),
      ENTRY(cuMemRetainAllocationHandle, 11000),
      ENTRY(cuMemExportToShareableHandle, 10020),
      ENTRY(cuMemImportFromShareableHandle, 10020),
      ENTRY(cuMemsetD8Async, 3020),
      ENTRY(cuStreamIsCapturing, 10000),
      ENTRY(cuEventCreate, 2000),
      ENTRY_V2(cuEventDestroy, 4000),
      ENTRY(cuEventRecord, 2000),
      ENTRY(cuEventQuery, 2000),
      ENTRY(cuEventSynchronize, 2000),
      ENTRY(cuGetErrorName, 6000),
      ENTRY(cuGetErrorString, 6000),
      {"cuGetProcAddress", 12000, reinterpret_cast<void*>(cuGetProcAddress_v2)},
  };
  *function = nullptr;
  if (flags > 2) return kInvalidValue;
  unsigned found = 1;  // CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
  for (const Entry& entry : entries)
    if (std::strcmp(entry.name, symbol) == 0) {
      found = version < entry.since ? 2 : 0;  // CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
      if (!found) *function = entry.function;
    }
  if (status) *status = found;
  return kSuccess;
}

// What tests control

std::size_t stub_calls(const char* name) {
  const std::lock_guard lock(state().mutex);
  return state().calls[name];
}
// The n-th call from now on fails, of this name or (null) of any; 1 is the next.
void stub_fail(const char* name, std::size_t nth, Result code) {
  const std::lock_guard lock(state().mutex);
  state().faults.push_back({name ? name : "", nth, code});
}
void stub_heal() {
  const std::lock_guard lock(state().mutex);
  state().faults.clear();
}
void stub_latency(const char* name, std::size_t microseconds) {
  const std::lock_guard lock(state().mutex);
  state().latencies[name] = microseconds;
}
// From now on calls of this name wait, having been counted, and under the driver's lock if there is one; those of the
// name before go on. Null: none waits.
void stub_hold(const char* name) {
  {
    const std::lock_guard lock(state().mutex);
    state().held = name ? name : "";
  }
  state().released.notify_all();
}
std::size_t stub_held() {
  const std::lock_guard lock(state().mutex);
  return state().holding;
}
// How many calls of a name, or "launch", had to wait for the driver's lock.
std::size_t stub_stalls(const char* name) {
  const std::lock_guard lock(state().mutex);
  return state().stalls[name];
}
void stub_logging(int on) {
  const std::lock_guard lock(state().mutex);
  state().logging = on;
  state().log.clear();
}
const char* stub_log() {
  const std::lock_guard lock(state().mutex);
  return joined(state().log);
}
const char* stub_violations() {
  const std::lock_guard lock(state().mutex);
  return joined(state().violations);
}
void stub_forgive() {
  const std::lock_guard lock(state().mutex);
  state().violations.clear();
}
// Whether calls take their time under a lock that launches need as well.
void stub_locking(int on) {
  const std::lock_guard lock(state().mutex);
  state().locking = on;
}
// The driver ends: every call fails from now on.
void stub_end() {
  const std::lock_guard lock(state().mutex);
  state().gone = true;
}
void stub_memory(std::size_t bytes) {
  const std::lock_guard lock(state().mutex);
  state().memory = bytes;
}
// Reservations, mappings, handles, events, bytes of memory: what is there now.
void stub_usage(std::size_t usage[5]) {
  const std::lock_guard lock(state().mutex);
  const State& s = state();
  const std::size_t values[5]{s.reservations.size(), s.mappings.size(), s.handles.size(), s.events.size(),
                              physical_bytes()};
  std::copy(values, values + 5, usage);
}
StreamHandle stub_stream(int device, int blocking) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto index = static_cast<std::size_t>(device);
  Stream* stream = blocking ? new Stream(&s.contexts[index], true) : s.pools[index][s.pooled++ % kPooledStreams];
  s.streams.insert(stream);
  return reinterpret_cast<StreamHandle>(stream);
}
// The streams of a device that do not block; how many there are.
std::size_t stub_pool(int device, StreamHandle* handles) {
  const auto& pool = state().pools[static_cast<std::size_t>(device)];
  if (handles) std::copy(pool.begin(), pool.end(), reinterpret_cast<Stream**>(handles));
  return pool.size();
}
static Stream* any_stream(StreamHandle handle) {
  return handle ? reinterpret_cast<Stream*>(handle) : state().default_streams[0];
}
// A kernel that reads, or reads and writes, a range of memory until it is completed.
void stub_launch(StreamHandle handle, Address address, std::size_t size, int writes) {
  State& s = state();
  std::unique_lock<std::mutex> driver;
  {
    const std::lock_guard lock(s.mutex);
    if (s.locking) driver = std::unique_lock(s.driver, std::defer_lock);
  }
  enter_driver(driver, "launch");
  const std::lock_guard lock(s.mutex);
  Stream* stream = any_stream(handle);
  if (stream->context->poison != kSuccess) return;
  Kernel kernel{++stream->launched, address, size, writes != 0};
  if (!is_accessible(s, *stream, kernel)) {
    kernel.faulted = true;
    s.violations.push_back("a kernel was launched over memory that it has no access to");
  }
  stream->running.push_back(kernel);
}
// Completes the oldest kernels of a stream. One that faulted is where the context fails, however long ago that was.
void stub_complete(StreamHandle handle, std::size_t kernels) {
  {
    State& s = state();
    const std::lock_guard lock(s.mutex);
    Stream* stream = any_stream(handle);
    auto& running = stream->running;
    const auto end = running.begin() + static_cast<std::ptrdiff_t>(std::min(kernels, running.size()));
    const bool faulted = std::any_of(running.begin(), end, [](const Kernel& kernel) { return kernel.faulted; });
    running.erase(running.begin(), end);
    if (faulted) poison(s, stream->context);
  }
  state().completed.notify_all();
}
// Begins a capture, or ends it; then whether there is a graph.
Result stub_capture(StreamHandle handle, int on, unsigned mode) {
  const std::lock_guard lock(state().mutex);
  Stream* stream = any_stream(handle);
  const Result result = stream->invalidated ? Result{kCaptureInvalidated} : Result{kSuccess};
  stream->capturing = on;
  stream->invalidated = false;
  stream->mode = mode;
  stream->capturer = std::this_thread::get_id();
  return result;
}
// Completes every kernel, ends every capture, forgets faults, latencies, violations and what kernels failed with, and
// gives memory back its size.
void stub_reset() {
  {
    State& s = state();
    const std::lock_guard lock(s.mutex);
    for (Stream* stream : s.streams) stream->running.clear(), stream->capturing = stream->invalidated = false;
    for (Stream* stream : s.default_streams) stream->running.clear();
    for (Context& context : s.contexts) context.poison = kSuccess;
    s.pooled = 0;
    s.locking = false;
    s.held.clear();
    s.stalls.clear();
    s.faults.clear();
    s.latencies.clear();
    s.violations.clear();
    s.memory = kMemory;
  }
  state().completed.notify_all();
  state().released.notify_all();
}
// How many threads wait for an event.
std::size_t stub_waiters() {
  const std::lock_guard lock(state().mutex);
  std::size_t waiters = 0;
  for (const Event* event : state().events) waiters += event->waiters;
  return waiters;
}

}  // extern "C"
#pragma GCC visibility pop
