#include "roofline.h"

#include <omp.h>

#include <algorithm>

namespace vattn::kernels {

void products(const Kernels& kernels, Type stored, std::int64_t count, int threads) {
#pragma omp parallel num_threads(threads)
  kernels.products[static_cast<int>(stored)]((count + threads - 1) / threads);
}

void read(const Kernels& kernels, const std::byte* data, std::int64_t bytes, int threads) {
  constexpr std::int64_t kLine = 64;
  const std::int64_t lines = bytes / kLine, share = (lines + threads - 1) / threads;
#pragma omp parallel num_threads(threads)
  {
    const std::int64_t first = std::min(lines, omp_get_thread_num() * share), last = std::min(lines, first + share);
    kernels.read(data + first * kLine, (last - first) * kLine);
  }
}

}  // namespace vattn::kernels
