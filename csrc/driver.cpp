#include "driver.h"

#include <utility>

namespace vattn {

const char* call_name(Call call) {
  static constexpr std::array<const char*, kCalls> names{
      "cuMemAddressReserve", "cuMemAddressFree", "cuMemCreate",
      "cuMemRelease",        "cuMemMap",         "cuMemUnmap",
      "cuMemSetAccess",      "cuCtxSetCurrent",  "cuThreadExchangeStreamCaptureMode",
      "cuEventCreate",       "cuEventRecord",    "cuEventQuery",
      "cuEventSynchronize",  "cuCtxSynchronize", "cuStreamIsCapturing",
      "cuMemsetD8Async"};
  return names[static_cast<unsigned>(call)];
}

DriverFailure::DriverFailure(Call call_, Result result_, std::string name_)
    : std::runtime_error(std::string(call_name(call_)) + " failed with " + name_ + " (" + std::to_string(result_) +
                         ")"),
      call(call_),
      result(result_),
      name(std::move(name_)) {}

Driver::~Driver() {
  if (stock_.empty() || fork_.forked() || exiting()) return;
  const Scope scope(*this);
  for (const EventHandle event : stock_) table_.event_destroy(event);
}

Result Driver::synchronize(const Event* event) {
  if (event) return counted(Call::kEventSynchronize, [&] { return table_.event_synchronize(event->handle()); });
  return counted(Call::kContextSynchronize, [&] { return table_.context_synchronize(); });
}

Result Driver::attach(Call* call) {
  *call = Call::kSetContext;
  const Result result = counted(Call::kSetContext, [&] { return table_.set_context(context_); });
  if (result != kSuccess) return result;
  *call = Call::kCaptureMode;
  unsigned mode = kCaptureRelaxed;
  return counted(Call::kCaptureMode, [&] { return table_.exchange_capture_mode(&mode); });
}

// What fails in here shows in the calls that it is for.
Driver::Scope::Scope(const Driver& driver) : driver_(driver) {
  driver_.table_.get_context(&before_);
  if (before_ != driver_.context_) driver_.table_.set_context(driver_.context_);
  driver_.table_.exchange_capture_mode(&mode_);
}

Driver::Scope::~Scope() {
  driver_.table_.exchange_capture_mode(&mode_);
  if (before_ != driver_.context_) driver_.table_.set_context(before_);
}

Result Driver::take_event(EventHandle* event) {
  {
    const std::lock_guard lock(stock_mutex_);
    if (!stock_.empty()) {
      *event = stock_.back();
      stock_.pop_back();
      return kSuccess;
    }
  }
  // Blocking: the worker sleeps until the event is complete, instead of spinning on a core.
  return counted(Call::kEventCreate,
                 [&] { return table_.event_create(event, kEventBlockingSync | kEventDisableTiming); });
}

std::shared_ptr<Event> Driver::record(StreamHandle stream) {
  if (fork_.forked()) throw std::logic_error("the driver belongs to the parent of this process");
  const Scope scope(*this);
  EventHandle handle = nullptr;
  Result result = take_event(&handle);
  if (result != kSuccess) throw failure(Call::kEventCreate, result);
  auto event = std::make_shared<Event>(shared_from_this(), handle);
  result = counted(Call::kEventRecord, [&] { return table_.event_record(handle, stream); });
  if (result != kSuccess) throw failure(Call::kEventRecord, result);
  return event;
}

Result Driver::zero(Address address, std::size_t size, Call* call, bool* touched) {
  *touched = false;
  EventHandle handle = nullptr;
  Result result = take_event(&handle);
  *call = Call::kEventCreate;
  if (result != kSuccess) return result;
  const Event event(shared_from_this(), handle);
  *call = Call::kMemset;
  result = counted(*call, [&] { return table_.memset_async(address, 0, size, per_thread_stream()); });
  if (result != kSuccess) return result;
  *touched = true;
  *call = Call::kEventRecord;
  result = counted(*call, [&] { return table_.event_record(handle, per_thread_stream()); });
  if (result != kSuccess) return result;
  *call = Call::kEventSynchronize;
  return synchronize(&event);
}

bool Driver::capturing(StreamHandle stream) {
  const Scope scope(*this);
  unsigned status = 0;
  const Result result = counted(Call::kIsCapturing, [&] { return table_.stream_is_capturing(stream, &status); });
  if (result == kCaptureImplicit) return true;
  if (result != kSuccess) throw failure(Call::kIsCapturing, result);
  return status != 0;
}

bool Driver::mapped(Address address, Handle* handle, Access* access) const {
  Flags flags = 0;
  if (table_.retain_handle(handle, reinterpret_cast<void*>(address)) != kSuccess) return false;
  table_.release(*handle);
  if (table_.get_access(&flags, &prop_.location, address) != kSuccess) return false;
  *access = static_cast<Access>(flags);
  return true;
}

std::string Driver::result_name(Result result) const {
  const char* name = nullptr;
  if (table_.error_name(result, &name) != kSuccess || !name) return "an unknown result";
  return name;
}

CallStats Driver::stats(Call call) const {
  const Counter& counter = counters_[static_cast<unsigned>(call)];
  return {counter.count.load(std::memory_order_relaxed), counter.nanoseconds.load(std::memory_order_relaxed)};
}

Event::~Event() {
  if (driver_->fork_.forked()) return;
  const std::lock_guard lock(driver_->stock_mutex_);
  driver_->stock_.push_back(handle_);
}

bool Event::done() const {
  const Driver::Scope scope(*driver_);
  return driver_->counted(Call::kEventQuery, [&] { return driver_->table_.event_query(handle_); }) == kSuccess;
}

}  // namespace vattn
