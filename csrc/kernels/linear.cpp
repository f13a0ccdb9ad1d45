#include "linear.h"

#include <omp.h>

#include <algorithm>

#include "room.h"

namespace vattn::kernels {

namespace {

// The input and the sums of an item stay in the second cache beside what is read of the weight meanwhile.
constexpr std::int64_t kRows = 256;
constexpr std::int64_t kWidth = 4;  // more vectors are never multiplied together

// Panels of an item: so many, of 4, 2 and 1 that are multiples of `each`, that the threads end earliest. A panel takes
// 1.7 times as long in a narrow item, and few rows, which wait for the weight, hardly longer.
std::int64_t item_width(std::int64_t panels, std::int64_t each, std::int64_t rows, int threads) {
  const std::int64_t narrow = rows > 8 ? 17 : 11;
  std::int64_t best = each, least = panels * narrow;
  for (std::int64_t width = each; width <= kWidth; width *= 2) {
    const std::int64_t whole = panels / width, over = whole % threads ? width : panels % width;
    const std::int64_t longest = (whole / threads * width + over) * (width == kWidth ? 10 : narrow);
    if (longest <= least) best = width, least = longest;
  }
  return best;
}

}  // namespace

void compute(const Linear& linear, const Kernels& kernels, int threads) {
  const std::int64_t lanes = kernels.lanes, each = linear.weight.each();
  const std::int64_t panels = (linear.weight.out + lanes - 1) / lanes * each;
  const std::int64_t width = item_width(panels, each, linear.rows, threads);
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
