// The whole test framework: TEST registers a test, the first CHECK that does not hold ends it, main runs them all (or
// those whose name contains the argument). Threads other than the main one must not CHECK: they report to it.
#pragma once

#include <cstdio>
#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace check {

struct Test {
  const char* name;
  void (*body)();
};
inline std::vector<Test> tests;
struct Registration {
  Registration(const char* name, void (*body)()) { tests.push_back({name, body}); }
};

inline std::string context;  // where a loop or a random sequence stands, for the report

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " + what.substr(0, 160) +
                           (context.empty() ? "" : "  [" + context + "]"));
}

template <class A, class B>
void equal(const char* file, int line, const char* text, const A& a, const B& b) {
  if (a == b) return;
  fail(file, line, (std::ostringstream() << text << ": " << a << " is not " << b).str());
}

}  // namespace check

#define TEST(name)                                            \
  static void name();                                         \
  static const check::Registration name##_test(#name, &name); \
  static void name()
#define SKIP(reason) return static_cast<void>(std::printf("skipped %s: %s\n", __func__, reason))
#define CHECK(condition) ((condition) ? void() : check::fail(__FILE__, __LINE__, #condition))
#define CHECK_EQ(a, b) check::equal(__FILE__, __LINE__, #a " == " #b, a, b)
#define CHECK_THROWS(type, expression)                                                  \
  do {                                                                                  \
    bool thrown = false;                                                                \
    try {                                                                               \
      static_cast<void>(expression);                                                    \
    } catch (const type&) {                                                             \
      thrown = true;                                                                    \
    }                                                                                   \
    if (!thrown) check::fail(__FILE__, __LINE__, #expression " does not throw " #type); \
  } while (false)

int main(int argc, char** argv) {
  int passed = 0, failed = 0;
  for (const check::Test& test : check::tests) {
    if (argc > 1 && std::string(test.name).find(argv[1]) == std::string::npos) continue;
    check::context.clear();
    try {
      test.body();
      ++passed;
    } catch (const std::exception& error) {
      std::printf("FAILED %s\n  %s\n", test.name, error.what());
      ++failed;
    }
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed || !passed;
}
