// Calls of the Python modules that leave the interpreter's lock to others.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

#include <exception>

namespace vattn {

inline thread_local bool is_without_lock = false;

// Runs the body without the interpreter's lock. A daemon thread that asks for it back while the interpreter ends,
// before Python 3.14, is unwound by pthread_exit, which ends the process at the first noexcept function; so it waits
// here.
template <class Body>
void without_lock(Body&& body) {
  PyThreadState* const thread = PyEval_SaveThread();
  is_without_lock = true;
  std::exception_ptr thrown;
  try {
    body();
  } catch (...) {
    thrown = std::current_exception();
  }
  is_without_lock = false;
  try {
    PyEval_RestoreThread(thread);
  } catch (abi::__forced_unwind&) {
    for (;;) pause();
  }
  if (thrown) std::rethrow_exception(thrown);
}

}  // namespace vattn
