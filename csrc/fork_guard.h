// Tells whether the process forked since an object was made. Worker threads, mappings (MADV_DONTFORK) and CUDA contexts
// do not survive a fork, so an object inherited by the child must neither be used nor torn down.
#pragma once

namespace vattn {

unsigned fork_generation();

class ForkGuard {
 public:
  bool forked() const { return generation_ != fork_generation(); }

 private:
  unsigned generation_ = fork_generation();
};

// Set when the process ends, before static objects go. Threads may still run, in the middle of a kernel, say: from then
// on no object is torn down that they could be using. The system takes everything back.
void set_exiting();
bool exiting();

}  // namespace vattn
