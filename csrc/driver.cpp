#include "driver.h"

#include <utility>

#include "left_behind.h"

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

Result Driver::synchronize(const Event* event, Call* call) {
  if (event) {
    *call = Call::kEventSynchronize;
    return counted(*call, [&] { return table_.event_synchronize(event->handle()); });
  }
  bool captures = false;
  *call = Call::kIsCapturing;
  if (const Result result = ask_any_capturing(&captures); result != kSuccess) return result;
  *call = Call::kContextSynchronize;
  return captures ? kCaptureUnsupported : counted(*call, [&] { return table_.context_synchronize(); });
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
  return synchronize(&event, call);
}

bool Driver::capturing(StreamHandle stream) {
  const Scope scope(*this);
  bool captures = false;
  if (const Result result = ask_capturing(stream, &captures); result != kSuccess)
    throw failure(Call::kIsCapturing, result);
  return captures;
}

bool Driver::any_capturing() {
  const Scope scope(*this);
  bool captures = false;
  if (const Result result = ask_any_capturing(&captures); result != kSuccess) throw failure(Call::kIsCapturing, result);
  return captures;
}

Result Driver::ask_capturing(StreamHandle stream, bool* captures) {
  unsigned status = 0;
  const Result result = counted(Call::kIsCapturing, [&] { return table_.stream_is_capturing(stream, &status); });
  *captures = result == kCaptureImplicit || status != 0;
  return result == kCaptureImplicit ? kSuccess : result;
}

Result Driver::ask_any_capturing(bool* captures) {
  Result result = ask_capturing(nullptr, captures);
  for (auto stream = streams_.begin(); result == kSuccess && !*captures && stream != streams_.end(); ++stream)
    result = ask_capturing(*stream, captures);
  return result;
}

bool Driver::try_read_only(std::size_t size) {
  const Scope scope(*this);
  Address address = 0;
  Handle handle = 0;
  Access access = Access::kNone;
  Call call = Call::kReserve;
  Result result = reserve(&address, size, 0);
  if (result != kSuccess) throw failure(call, result);
  call = Call::kCreate;
  result = create(&handle, size);
  if (result == kSuccess) {
    call = Call::kMap;
    result = map(address, size, handle, false);
    if (result == kSuccess) {
      call = Call::kSetAccess;
      result = set_access(address, size, Access::kReadWrite);
      Handle found = 0;
      if (result == kSuccess && set_access(address, size, Access::kRead) == kSuccess)
        static_cast<void>(mapped(address, &found, &access));
      unmap(address, size);
    }
    release(handle);
  }
  free(address, size);
  if (result != kSuccess) throw failure(call, result);
  return access == Access::kRead;
}

bool Driver::mapped(Address address, Handle* handle, Access* access) {
  if (table_.retain_handle(handle, reinterpret_cast<void*>(address)) != kSuccess) return false;
  if (table_.release(*handle) != kSuccess) leave_behind({.driver = shared_from_this(), .handles = {*handle}});
  Flags first = 0;
  for (const Location& location : locations_) {
    Flags flags = 0;
    if (table_.get_access(&flags, &location, address) != kSuccess) return false;
    if (&location == &locations_.front()) first = flags;
    if (flags != first) return false;
  }
  *access = static_cast<Access>(first);
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
