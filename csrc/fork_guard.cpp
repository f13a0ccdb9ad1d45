#include "fork_guard.h"

#include <pthread.h>

#include <atomic>

namespace vattn {
namespace {
std::atomic<unsigned> generation{0};
std::atomic<bool> ends{false};
// When the library is loaded, not at the first use: a child forked during that would inherit the lock of a static's
// initialisation.
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1); });
}  // namespace

unsigned fork_generation() { return generation.load(std::memory_order_relaxed); }

void set_exiting() { ends = true; }
bool exiting() { return ends; }

}  // namespace vattn
