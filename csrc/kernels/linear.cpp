#include "linear.h"

#include <omp.h>

#include <algorithm>

#include "room.h"

namespace vattn::kernels {

namespace {

// An item's share of the weight and of the input stay in the second cache together with its sums.
constexpr std::int64_t kRows = 256;
constexpr std::int64_t kPanelsOfItem = 16;
// Items per thread, so that threads end at nearly the same time.
constexpr std::int64_t kItems = 4;

}  // namespace

void compute(const Linear& linear, const Kernels& kernels, int threads) {
  const std::int64_t lanes = kernels.lanes;
  const std::int64_t panels = (linear.out + lanes - 1) / lanes;
  const std::int64_t most_rows = std::min(kRows, linear.rows);
  // An even number, since products take vectors in pairs.
  const std::int64_t share = (panels + kItems * threads - 1) / (kItems * threads);
  const std::int64_t width = std::min(kPanelsOfItem, (share + 1) / 2 * 2);
  const std::int64_t columns = (panels + width - 1) / width;

  const std::size_t input = aligned(most_rows * linear.in * sizeof(float));
  const std::size_t ones = aligned(most_rows * sizeof(float));
  const std::size_t sums = aligned(most_rows * width * lanes * sizeof(float));
  static thread_local Room room;
  std::byte* memory = room.reserve(input + ones + static_cast<std::size_t>(threads) * sums);
  float* wide = reinterpret_cast<float*>(memory);
  float* one = reinterpret_cast<float*>(memory + input);
  std::fill_n(one, most_rows, 1.0f);

#pragma omp parallel num_threads(threads)
  {
    float* own =
        reinterpret_cast<float*>(memory + input + ones + static_cast<std::size_t>(omp_get_thread_num()) * sums);
    for (std::int64_t row = 0; row < linear.rows; row += kRows) {
      const std::int64_t num_rows = std::min(kRows, linear.rows - row);
#pragma omp for schedule(static)
      for (std::int64_t i = 0; i < num_rows; ++i) kernels.linear_row(linear, row + i, wide + i * linear.in);
#pragma omp for schedule(dynamic)
      for (std::int64_t i = 0; i < columns; ++i)
        kernels.linear(linear, {row, num_rows, i * width, std::min(width, panels - i * width), wide, own, one});
    }
  }
}

}  // namespace vattn::kernels
