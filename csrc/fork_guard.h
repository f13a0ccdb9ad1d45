// Tells whether the process forked since an object was made. Worker threads, mappings (MADV_DONTFORK) and CUDA contexts
// do not survive a fork, so an object inherited by the child must neither be used nor torn down.
#pragma once

#include <atomic>
#include <memory>

namespace vattn {

unsigned fork_generation();

class ForkGuard {
 public:
  bool forked() const { return generation_ != fork_generation(); }

 private:
  unsigned generation_ = fork_generation();
};

// A forked child starts with a new one. What it inherited is leaked on purpose: threads that do not exist there may
// have locked it, or been in the midst of changing it. Pre: T has a guard named `fork`.
template <class T>
T& of_this_process(std::atomic<T*>& current) {
  T* found = current.load(std::memory_order_acquire);
  if (!found->fork.forked()) return *found;
  auto fresh = std::make_unique<T>();
  if (!current.compare_exchange_strong(found, fresh.get(), std::memory_order_acq_rel)) return *found;
  return *fresh.release();
}

// Set when the process ends, before static objects go. Threads may still run, in the middle of a kernel, say: from then
// on no object is torn down that they could be using. The system takes everything back.
void set_exiting();
bool exiting();

}  // namespace vattn
