// How long a function takes, for choices that are made by measurement.
#pragma once

#include <algorithm>
#include <chrono>

namespace vattn::kernels {
namespace {

// The least of several times, in seconds.
template <class Function>
double seconds(const Function& function) {
  double least = 1;
  for (int attempt = 0; attempt < 8; ++attempt) {
    const auto start = std::chrono::steady_clock::now();
    function();
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    least = std::min(least, time.count());
  }
  return least;
}

}  // namespace
}  // namespace vattn::kernels
