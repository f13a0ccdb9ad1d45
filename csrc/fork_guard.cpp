#include "fork_guard.h"

#include <pthread.h>

#include <atomic>

namespace vattn {
namespace {
std::atomic<unsigned> generation{0};
}

unsigned fork_generation() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1); });
  (void)registered;
  return generation.load(std::memory_order_relaxed);
}

}  // namespace vattn
