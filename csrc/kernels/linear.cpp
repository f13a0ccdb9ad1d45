#include "linear.h"

#include <omp.h>

#include <algorithm>

#include "room.h"

namespace vattn::kernels {

namespace {

// The input and the sums of an item stay in the second cache beside what is read of the weight meanwhile.
constexpr std::int64_t kRows = 256;
// At most, and even; more vectors are never multiplied together. Fewer, where threads would have less than two items.
constexpr std::int64_t kWidth = 4;

}  // namespace

void compute(const Linear& linear, const Kernels& kernels, int threads) {
  const std::int64_t lanes = kernels.lanes, each = linear.weight.each();
  const std::int64_t panels = (linear.weight.out + lanes - 1) / lanes * each;
  const std::int64_t width = std::clamp<std::int64_t>(panels / (2 * threads) / each * each, each, kWidth);
  const std::int64_t parts = (linear.rows + kRows - 1) / kRows;
  const std::int64_t most_rows = parts ? (linear.rows + parts - 1) / parts : 0;

  const bool in_place = !kernels.linear_row;
  const std::size_t input = in_place ? 0 : aligned(most_rows * linear.weight.in * sizeof(float));
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
    for (std::int64_t row = 0; row < linear.rows; row += most_rows) {
      const std::int64_t num_rows = std::min(most_rows, linear.rows - row);
      const std::byte* rows = in_place ? linear.input + row * linear.input_stride : memory;
      const std::int64_t stride =
          in_place ? linear.input_stride / std::int64_t{sizeof(std::uint32_t)} : linear.weight.in;
      if (!in_place) {
#pragma omp for schedule(static)
        for (std::int64_t i = 0; i < num_rows; ++i) kernels.linear_row(linear, row + i, wide + i * linear.weight.in);
      }
#pragma omp for schedule(dynamic)
      for (std::int64_t i = 0; i < panels; i += width)
        kernels.linear(linear, {row, num_rows, i, std::min(width, panels - i),
                                reinterpret_cast<const std::uint32_t*>(rows), stride, own, one});
    }
  }
}

}  // namespace vattn::kernels
