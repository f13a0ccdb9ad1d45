// Products of bfloat16 as floats: neighbours are read in pairs, and become floats in registers.
#pragma once

#include "row_lanes.h"

namespace vattn::kernels {
namespace {

// A query is its even elements, then its odd ones; so are values.
template <class Isa_>
struct Widened : Neighbours<Isa_> {
  using Isa = Isa_;
  using F = typename Isa::F;
  static constexpr int kTokens = 1;
  static constexpr int kMultiple = 1;
  static constexpr int kRowMultiple = 1;
  static constexpr int kVectors = 2;
  static constexpr int kVectorBytes = 2 * Isa::kLanes;
  static constexpr int kOrdered = 2 * kVectorBytes == kLine ? 3 : Isa::kOrdered;
  static constexpr int kFloatPanels = Isa::kFloatPanels;

  struct ForKeys : PlainProduct<Isa> {
    static constexpr int kMaxRows = Isa::kMaxRowsOfPairs;
    static constexpr int columns(int rows) { return Isa::columns_of_pairs(rows); }
    static F step(F sum, const std::uint32_t* a, int gap, F b) {
      sum = Isa::fma(Isa::broadcast(reinterpret_cast<const float*>(a)), Isa::even(b), sum);
      return Isa::fma(Isa::broadcast(reinterpret_cast<const float*>(a + gap)), Isa::odd(b), sum);
    }
  };
  using ForValues = typename FloatOperands<Isa>::Product;

  using Lanes = RowLanes<Widened>;
  static constexpr int kLaneRows = 4, kQueryParts = 2, kHead = 0;
  struct LaneSum {
    F sum;
    void start(const std::uint32_t*) { sum = Isa::zero(); }
    void step(const std::uint32_t* queries, int part, F keys) {
      const float* q = reinterpret_cast<const float*>(queries);
      sum = Isa::fma(Isa::load(q + part), Isa::odd(keys), Isa::fma(Isa::load(q), Isa::even(keys), sum));
    }
    F finish() const { return sum; }
    static F add(F x, F y) { return Isa::add(x, y); }
  };

  static int query_stride(int head_dim) { return head_dim; }
  static int query_gap(int head_dim) { return head_dim / 2; }
  static F exp2(F x) { return Isa::exp2(x); }
  template <class Weight>
  static float pack_weights(int vectors, const Weight& weight, std::uint32_t* out) {
    return FloatOperands<Isa>::pack_weights(vectors, weight, out);
  }

  static void values(const std::byte* const* rows, int, int first, int rest, F (&out)[2]) {
    const std::byte* at = rows[0] + 2 * first;
    const F pairs = rest >= 2 * Isa::kLanes ? Isa::load(reinterpret_cast<const float*>(at)) : Isa::dwords(at, rest / 2);
    out[0] = Isa::even(pairs);
    out[1] = Isa::odd(pairs);
  }
  static void order(F (&x)[2]) { Isa::interleave(x[0], x[1]); }

  template <Type kType>
  static void split_row(const std::byte* row, int count, std::uint32_t* out) {
    constexpr int kLanes = Isa::kLanes;
    const auto load = [&](int i) {
      return Isa::template widen<kType>(row + i * size_of(kType), smaller(kLanes, count - i));
    };
    float* const even = reinterpret_cast<float*>(out);
    for (int i = 0; i < count; i += 2 * kLanes) {
      F low = load(i), high = i + kLanes < count ? load(i + kLanes) : Isa::zero();
      Isa::separate(low, high);
      const int pairs = smaller(kLanes, (count - i) / 2);
      Isa::store(even + i / 2, low, pairs);
      Isa::store(even + (count + i) / 2, high, pairs);
    }
  }
  static float pack_query(const Attention& a, const std::byte* row, std::uint32_t* out) {
    with_type(a.query_type, [&]<Type kType>() { split_row<kType>(row, a.head_dim, out); });
    return 1;
  }
};

}  // namespace
}  // namespace vattn::kernels
