#include "driver.h"

#include <string>

namespace vattn {

const char* call_name(Call call) {
  static constexpr std::array<const char*, kCalls> names{"cuMemAddressReserve", "cuMemAddressFree", "cuMemCreate",
                                                         "cuMemRelease",        "cuMemMap",         "cuMemUnmap",
                                                         "cuMemSetAccess",      "cuCtxSetCurrent"};
  return names[static_cast<unsigned>(call)];
}

const char* result_name(Result result) {
  switch (result) {
    case kSuccess:
      return "CUDA_SUCCESS";
    case kInvalidValue:
      return "CUDA_ERROR_INVALID_VALUE";
    case kOutOfMemory:
      return "CUDA_ERROR_OUT_OF_MEMORY";
    case kNotInitialized:
      return "CUDA_ERROR_NOT_INITIALIZED";
    case kInvalidContext:
      return "CUDA_ERROR_INVALID_CONTEXT";
    case kMapFailed:
      return "CUDA_ERROR_MAP_FAILED";
    case kUnmapFailed:
      return "CUDA_ERROR_UNMAP_FAILED";
    case kAlreadyMapped:
      return "CUDA_ERROR_ALREADY_MAPPED";
    case kNotMapped:
      return "CUDA_ERROR_NOT_MAPPED";
    case kNotPermitted:
      return "CUDA_ERROR_NOT_PERMITTED";
    case kNotSupported:
      return "CUDA_ERROR_NOT_SUPPORTED";
    default:
      return "CUDA_ERROR_UNKNOWN";
  }
}

DriverFailure::DriverFailure(Call call_, Result result_)
    : std::runtime_error(std::string(call_name(call_)) + " failed with " + result_name(result_) + " (" +
                         std::to_string(result_) + ")"),
      call(call_),
      result(result_) {}

bool Driver::mapped(Address address, Handle* handle, Access* access) const {
  Flags flags = 0;
  if (table_.retain_handle(handle, reinterpret_cast<void*>(address)) != kSuccess) return false;
  table_.release(*handle);
  if (table_.get_access(&flags, &prop_.location, address) != kSuccess) return false;
  *access = static_cast<Access>(flags);
  return true;
}

CallStats Driver::stats(Call call) const {
  const Counter& counter = counters_[static_cast<unsigned>(call)];
  return {counter.count.load(std::memory_order_relaxed), counter.nanoseconds.load(std::memory_order_relaxed)};
}

}  // namespace vattn
