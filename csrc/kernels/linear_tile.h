// The product of linear.h, by the tiles of attention.
#pragma once

#include "linear.h"
#include "tile.h"

namespace vattn::kernels {
namespace {

// Pairs of inputs whose part of a tile of rows stays in the first cache.
constexpr int kPairs = 256;

template <class Kind>
void widen_row(const Linear& linear, std::int64_t row, float* out) {
  Kind::template split_row<Type::kBFloat16>(linear.input + row * linear.input_stride, static_cast<int>(linear.in),
                                            reinterpret_cast<std::uint32_t*>(out));
}

template <class Kind>
void linear_item(const Linear& linear, const LinearItem& item) {
  using Isa = typename Kind::Isa;
  using F = typename Isa::F;
  constexpr int kLanes = Isa::kLanes;
  const int pairs = static_cast<int>(linear.in / 2);
  const std::int64_t panel = static_cast<std::int64_t>(pairs) * kLanes, width = item.num_panels * kLanes;
  for (int pair = 0; pair < pairs; pair += kPairs) {
    const Panels<Isa> weight{linear.panels + item.panel * panel + pair * kLanes, panel};
    multiply<typename Kind::ForKeys>(
        static_cast<int>(item.num_rows), reinterpret_cast<const std::uint32_t*>(item.input + pair),
        static_cast<int>(linear.in), pairs, weight, static_cast<int>(item.num_panels), smaller(kPairs, pairs - pair),
        item.ones, pair ? item.ones : nullptr, item.sums, width);
  }
  constexpr int kSize = size_of(Type::kBFloat16);
  const std::int64_t first = item.panel * kLanes;
  for (std::int64_t r = 0; r < item.num_rows; ++r) {
    const std::int64_t at = (item.row + r) * linear.out;
    for (std::int64_t i = 0; i < width && first + i < linear.out; i += kLanes) {
      const int count = smaller(kLanes, static_cast<int>(linear.out - first - i));
      const auto load = [&](const std::byte* x) { return Isa::template widen<Type::kBFloat16>(x, count); };
      F x = Isa::load(item.sums + r * width + i);
      if (linear.bias) x = Isa::add(x, load(linear.bias + (first + i) * kSize));
      if (linear.other) x = Isa::add(x, load(linear.other + (at + first + i) * kSize));
      Isa::template narrow<Type::kBFloat16>(linear.output + (at + first + i) * kSize, x, count);
    }
  }
}

}  // namespace
}  // namespace vattn::kernels
