#include "left_behind.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <mutex>
#include <utility>

#include "fork_guard.h"

namespace vattn {
namespace {

// Never destroyed: what waits when the process ends is left to the system.
struct LeftBehind {
  std::mutex mutex;
  std::vector<Remains> remains;
  const ForkGuard fork;
};

LeftBehind& left_behind() {
  static std::atomic<LeftBehind*> current{new LeftBehind};
  return of_this_process(current);
}

}  // namespace

bool Remains::give_back() {
  const Driver::Scope scope(*driver);
  Call call;
  std::erase_if(handles, [&](Handle handle) { return driver->release(handle) == kSuccess; });
  if (!mapped.empty())
    if (const Result result = driver->synchronize(nullptr, &call); result != kSuccess)
      return result != kCaptureUnsupported;
  std::erase_if(mapped, [&](Address at) { return driver->unmap(at, page_size) == kSuccess; });
  if (!mapped.empty()) return false;
  std::erase_if(bases, [&](Address base) { return driver->free(base, base_bytes) == kSuccess; });
  return bases.empty() && handles.empty();
}

void leave_behind(Remains remains) {
  LeftBehind& left = left_behind();
  const std::lock_guard lock(left.mutex);
  left.remains.push_back(std::move(remains));
}

void give_back_left_behind() {
  LeftBehind& left = left_behind();
  if (exiting()) return;
  std::vector<Remains> remains;  // tried without the lock: the driver's calls may take long, or need other locks
  {
    const std::lock_guard lock(left.mutex);
    remains.swap(left.remains);
  }
  std::erase_if(remains, [](Remains& each) { return each.give_back(); });
  const std::lock_guard lock(left.mutex);
  std::move(remains.begin(), remains.end(), std::back_inserter(left.remains));
}

}  // namespace vattn
