// The product of linear.h, by the tiles of attention.
#pragma once

#include "layer_rows.h"
#include "linear.h"
#include "tile.h"

namespace vattn::kernels {
namespace {

// Pairs of inputs whose part of a tile of rows stays in the first cache.
template <class Isa>
constexpr int kPairs = 16 * Isa::kLanes;

// Whether a weight becomes floats once for all rows, and not in every tile of them. Sums are the same, bit by bit.
template <class Isa>
bool widens_weight(const Linear& linear) {
  return Isa::kFloatWeights && linear.rows >= Isa::kFloatWeights;
}

// Even elements, then odd ones; or all in their order, for a weight that becomes floats.
template <class Kind>
void widen_row(const Linear& linear, std::int64_t row, float* out) {
  using Isa = typename Kind::Isa;
  const std::byte* input = linear.input + row * linear.input_stride;
  const int in = static_cast<int>(linear.weight.in);
  if (!widens_weight<Isa>(linear)) {
    Kind::template split_row<Type::kBFloat16>(input, in, reinterpret_cast<std::uint32_t*>(out));
    return;
  }
  for (int i = 0; i < in; i += Isa::kLanes) {
    const int count = smaller(Isa::kLanes, in - i);
    Isa::store(out + i, Isa::template widen<Type::kBFloat16>(input + i * size_of(Type::kBFloat16), count), count);
  }
}

// Panels of a weight. While products read a part of them, the part that comes next is fetched; each tile of rows takes
// a share, so that its lines are spread over all of them.
template <class Isa>
struct Weight : Panels<Isa> {
  // One more, and a sum of 7 x 4 would not stay in the 32 registers of AVX-512 beside four vectors of the weight.
  static constexpr int kMaxRows = smaller(Isa::kMaxRowsInPlace, 6);
  const std::byte* next;  // of the first panel

  // One line of each of so many panels, in one of `mask + 1` steps.
  struct Share {
    const std::byte* line;
    std::int64_t stride;
    int panels, mask;

    template <int>
    void step(int k) {
      if (k & mask) return;
      // Not a loop, which takes 1.04 to 1.2 times as long.
      fetch(line);
      if (panels > 1) fetch(line + stride);
      if (panels > 2) {
        fetch(line + 2 * stride);
        fetch(line + 3 * stride);
      }
      line += kLine;
    }
  };
  Share ahead(Part part) const {
    constexpr int kSteps = kLine / (4 * Isa::kLanes);  // that read a line
    const std::int64_t bytes = this->stride * 4;
    const std::byte* line = next + part.first * bytes;
    const int tiles = part.tile.count;
    if (tiles < part.each) {
      const int panels = ceil_div(part.each, tiles);
      return {line + smaller(part.tile.index * panels, part.each - 1) * bytes, bytes, panels, kSteps - 1};
    }
    const int at = part.tile.index * part.each * part.steps / tiles;
    return {line + at / part.steps * bytes + at % part.steps / kSteps * kLine, 0, 1,
            power_of_two(tiles / part.each * kSteps) - 1};
  }
};

// The sums over `count` pairs of inputs, of which `pair` is the first, are added to those over the pairs before them.
template <class Kind>
void add_products(const Linear& linear, const LinearItem& item, int pair, int count) {
  using Isa = typename Kind::Isa;
  constexpr int kLanes = Isa::kLanes;
  const int pairs = static_cast<int>(linear.weight.in / 2), rows = static_cast<int>(item.num_rows);
  const int stride = static_cast<int>(item.input_stride), panels = static_cast<int>(item.num_panels);
  const std::int64_t panel = static_cast<std::int64_t>(pairs) * kLanes, width = item.num_panels * kLanes;
  const std::uint32_t* data = linear.weight.panels + item.panel * panel + pair * kLanes;
  const std::uint32_t* next = data + (pair + count < pairs ? count * kLanes : item.num_panels * panel - pair * kLanes);
  const Weight<Isa> weight{{data, panel}, reinterpret_cast<const std::byte*>(next)};
  const float* before = pair ? item.ones : nullptr;
  if constexpr (Isa::kFloatWeights != 0)
    if (widens_weight<Isa>(linear)) {
      constexpr int kColumns = 2, kWide = 2 * kPairs<Isa> * kLanes;
      alignas(64) float wide[kColumns * kWide];
      for (int first = 0; first < panels; first += kColumns) {
        const int columns = smaller(kColumns, panels - first);
        for (int c = 0; c < columns; ++c)
          for (int i = 0; i < count; ++i) {
            typename Isa::F x[1];
            weight.load(first + c, i, x);
            Isa::store(wide + c * kWide + 2 * i * kLanes, Isa::even(x[0]), kLanes);
            Isa::store(wide + c * kWide + (2 * i + 1) * kLanes, Isa::odd(x[0]), kLanes);
          }
        multiply<typename FloatOperands<Isa>::Product>(
            rows, item.input + 2 * pair, stride, 0, Panels<Isa>{reinterpret_cast<const std::uint32_t*>(wide), kWide},
            columns, 2 * count, item.ones, before, item.sums + first * kLanes, width);
      }
      return;
    }
  multiply<typename Kind::ForKeys>(rows, item.input + pair, stride, pairs, weight, panels, count, item.ones, before,
                                   item.sums, width);
}

template <class Kind>
void linear_item(const Linear& linear, const LinearItem& item) {
  using Isa = typename Kind::Isa;
  using F = typename Isa::F;
  constexpr int kLanes = Isa::kLanes;
  const int pairs = static_cast<int>(linear.weight.in / 2);
  // Of nearly equal size, so that the products of each part fetch all of the next one.
  const int part = ceil_div(pairs, ceil_div(pairs, kPairs<Isa>));
  for (int pair = 0; pair < pairs; pair += part) add_products<Kind>(linear, item, pair, smaller(part, pairs - pair));
  constexpr int kSize = size_of(Type::kBFloat16);
  const std::int64_t out = linear.weight.out;
  const std::byte* bias = linear.weight.bias;
  const int each = linear.weight.each();
  const std::int64_t first = item.panel / each * kLanes, last = first + item.num_panels / each * kLanes;
  const float* sums = item.sums;
  for (std::int64_t row = item.row; row < item.row + item.num_rows; ++row)
    for (std::int64_t i = first; i < last; i += kLanes, sums += each * kLanes) {
      if (i >= out) continue;
      const int count = smaller(kLanes, static_cast<int>(out - i));
      const auto load = [&](const std::byte* x, std::int64_t at) {
        return Isa::template widen<Type::kBFloat16>(x + at * kSize, count);
      };
      F x = Isa::load(sums);
      if (bias) x = Isa::add(x, load(bias, i));
      if (linear.weight.gated) {
        F up = Isa::load(sums + kLanes);
        if (bias) up = Isa::add(up, load(bias, out + i));
        x = silu_times<Isa>(x, up);
      }
      if (linear.other) x = Isa::add(x, load(linear.other, row * out + i));
      Kind::round(linear.output + (row * out + i) * kSize, x, count);
    }
}

}  // namespace
}  // namespace vattn::kernels
