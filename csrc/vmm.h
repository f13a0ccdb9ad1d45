// The one door to virtual memory: a table of driver calls with the signatures of CUDA's virtual memory management
// API, so that one mechanism runs over CUDA's driver and over the host's memory. Nothing here includes CUDA's
// headers; the structs and numbers repeat its ABI.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vattn {

using Address = unsigned long long;  // CUdeviceptr
using Handle = unsigned long long;   // CUmemGenericAllocationHandle
using Flags = unsigned long long;
using Result = int;                 // CUresult
using StreamHandle = struct CUst*;  // CUstream; null is the legacy default stream
using EventHandle = struct CUev*;   // CUevent

// The calling thread's own stream, which waits for the legacy default stream and is waited for by it, but by no other.
inline StreamHandle per_thread_stream() { return reinterpret_cast<StreamHandle>(std::uintptr_t{2}); }

// The CUresults that this code names; a provider may return any other.
enum : Result {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kInvalidContext = 201,
  kMapFailed = 205,
  kUnmapFailed = 206,
  kAlreadyMapped = 208,
  kNotMapped = 211,
  kInvalidHandle = 400,
  kNotReady = 600,
  kNotPermitted = 800,
  kNotSupported = 801,
  kCaptureUnsupported = 900,
  kCaptureImplicit = 906,
  kUnknown = 999,
};

enum class Access : unsigned { kNone = 0, kRead = 1, kReadWrite = 3 };  // CUmemAccess_flags

enum : unsigned { kEventBlockingSync = 1, kEventDisableTiming = 2 };                   // CUevent_flags
enum : unsigned { kCaptureGlobal = 0, kCaptureThreadLocal = 1, kCaptureRelaxed = 2 };  // CUstreamCaptureMode

enum : unsigned { kLocationDevice = 1, kLocationHost = 2 };  // CUmemLocationType

struct Location {  // CUmemLocation
  unsigned type;
  int id;
};

struct AccessDesc {  // CUmemAccessDesc
  Location location;
  unsigned flags;
};

enum : unsigned { kPosixFileDescriptor = 1, kFabric = 8 };  // CUmemAllocationHandleType

struct AllocationProp {  // CUmemAllocationProp
  unsigned type;         // 1: CU_MEM_ALLOCATION_TYPE_PINNED
  unsigned requested_handle_types;
  Location location;
  void* win32_handle_metadata;
  struct {
    unsigned char compression_type;
    unsigned char gpu_direct_rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
  } alloc_flags;
};
static_assert(sizeof(AccessDesc) == 12 && sizeof(AllocationProp) == 32, "CUDA's ABI");

// `granularity` below is the size of a page as cuMemGetAllocationGranularity reports it for `prop`. A call that fails
// changes nothing. Every call but those of the last group may be made from any thread on which `set_context` succeeded.
//
// The host has no streams: what its calls did is done when they return. Its events are complete once recorded.
struct Vmm {
  // Memory. None of these is guaranteed to wait for kernels: wait first for those that still read what is to go.

  // Pre: size is a multiple of the granularity; alignment is 0 or a power of two; hint is 0.
  // Post: [*address, *address + size) belongs to the caller; nothing is mapped there.
  Result (*address_reserve)(Address* address, std::size_t size, std::size_t alignment, Address hint, Flags flags);
  // Pre: exactly the range that one address_reserve returned; nothing is mapped in it.
  Result (*address_free)(Address address, std::size_t size);
  // Pre: size is a multiple of the granularity. Post: *handle stands for `size` bytes of physical memory, referenced
  // once.
  Result (*create)(Handle* handle, std::size_t size, const AllocationProp* prop, Flags flags);
  // Pre: the handle has a reference left. Post: one less; the memory goes when no reference and no mapping is left.
  Result (*release)(Handle handle);
  // Pre: address and size are multiples of the granularity, size is the handle's, offset is 0, the range lies in one
  // reservation and nothing is mapped in it. Post: mapped, without access.
  Result (*map)(Address address, std::size_t size, std::size_t offset, Handle handle, Flags flags);
  // Pre: the range is one whole mapping; where the provider says so (Driver::unmap_ranges), it may be several, without
  // a gap. Post: nothing is mapped there.
  Result (*unmap)(Address address, std::size_t size);
  // Pre: the range consists of whole mappings, without a gap. Post: it is readable, or readable and writable, by each
  // descriptor's location.
  Result (*set_access)(Address address, std::size_t size, const AccessDesc* descs, std::size_t count);
  // Pre: something is mapped at address. Post: *flags is the access that `location` has there.
  Result (*get_access)(Flags* flags, const Location* location, Address address);
  // Pre: something is mapped at address. Post: *handle is what is mapped there, with one reference more.
  Result (*retain_handle)(Handle* handle, void* address);
  // Pre: the handle has a reference left, and was created with prop->requested_handle_types including `type`, which is
  // kPosixFileDescriptor (CUDA's driver 580 refuses an imported one); flags is 0. Post: *shareable is an int: a file
  // descriptor that stands for the memory in any process that gets it, keeps it alive, and is the caller's to close.
  Result (*export_handle)(void* shareable, Handle handle, unsigned type, Flags flags);
  // Pre: `shareable` is, cast to a pointer, a file descriptor that export_handle made, here or in another process; type
  // is kPosixFileDescriptor. Post: *handle stands for the same memory, referenced once. The descriptor stays the
  // caller's, and may be closed.
  Result (*import_handle)(Handle* handle, void* shareable, unsigned type);

  // Work that kernels do.

  // Pre: the range is mapped, and may be written, by the context's location. Post: every byte of it has the value
  // before anything that is launched on the stream later runs.
  Result (*memset_async)(Address address, unsigned char value, std::size_t size, StreamHandle stream);

  // Post: *event is an event that nothing was recorded in, which counts as complete.
  Result (*event_create)(EventHandle* event, unsigned flags);
  // Pre: nobody waits for the event. It need not be complete.
  Result (*event_destroy)(EventHandle event);
  // Pre: the stream does not capture a graph. Post: the event is complete when all is that was launched on the stream.
  Result (*event_record)(EventHandle event, StreamHandle stream);
  // kSuccess if the event is complete, else kNotReady.
  Result (*event_query)(EventHandle event);
  // Returns when the event is complete.
  Result (*event_synchronize)(EventHandle event);
  // Returns when all is complete that was launched in the context. Pre: no stream in it captures a graph.
  Result (*context_synchronize)();
  // Post: *status is 0 where the stream does not capture a graph. Also kCaptureImplicit: it is the legacy default
  // stream, and another, which it would have to wait for, captures.
  Result (*stream_is_capturing)(StreamHandle stream, unsigned* status);

  // The calling thread. These need no context.

  // Makes the provider's context (null on the host) current on the calling thread; null: makes none current.
  Result (*set_context)(void* context);
  // Post: *context is what is current on the calling thread, or null.
  Result (*get_context)(void** context);
  // Swaps *mode with the calling thread's mode, which decides what the thread may call while a graph is captured: in
  // kCaptureGlobal, the default, nothing that the capture might miss, whichever thread captures; in kCaptureRelaxed
  // everything.
  Result (*exchange_capture_mode)(unsigned* mode);
  // Post: *name is the provider's name for a result. kInvalidValue, and null, where it has none.
  Result (*error_name)(Result result, const char** name);
};

}  // namespace vattn
