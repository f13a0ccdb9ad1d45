// Scores of a few rows of queries, with keys as they lie.
//
// The rows share the lanes: each has `lanes / rows` neighbouring lanes, for as many neighbouring elements. Keys need
// not be transposed then: what a step reads of a key is repeated for every row by the load itself. The lanes of a row
// are added at the end, for as many keys at once as there are lanes. With more rows than lanes, panels take fewer
// products.
#pragma once

#include "tile.h"

namespace vattn::kernels {
namespace {

// A vector of each key, as many as there are lanes, with the sums of `kRows` rows in parts, become a vector for each
// row, of the keys' sums. Each level takes a bit off the numbers of the lanes: first parts are added, then rows are
// told apart.
template <class Kind, int kRows, int kLevel = 0, int kGroups = 1, int kVectors = Kind::Isa::kLanes>
void by_rows(typename Kind::Isa::F (&x)[Kind::Isa::kLanes]) {
  using Isa = typename Kind::Isa;
  using F = typename Isa::F;
  if constexpr (1 << kLevel < Isa::kLanes) {
    constexpr bool kAdded = (kRows << kLevel) < Isa::kLanes;
    constexpr int kHalf = kGroups * kVectors / 2;
    F y[Isa::kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kHalf; ++i) {
      const F even = Isa::template half<kLevel, false>(x[2 * i], x[2 * i + 1]);
      const F odd = Isa::template half<kLevel, true>(x[2 * i], x[2 * i + 1]);
      if constexpr (kAdded) {
        y[i] = Kind::LaneSum::add(even, odd);
      } else {
        y[i] = even;
        y[i + kHalf] = odd;
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < (kAdded ? 1 : 2) * kHalf; ++i) x[i] = y[i];
    by_rows<Kind, kRows, kLevel + 1, kAdded ? kGroups : 2 * kGroups, kVectors / 2>(x);
  }
}

// `Kind` says what a sum is, how it starts and ends and what adds two (`LaneSum`), of how many parts a packed row of
// queries is (`kQueryParts`, after `kHead` words), and up to how many rows this is worthwhile (`kLaneRows`).
template <class Kind>
struct RowLanes {
  static constexpr int kLanes = Kind::Isa::kLanes;

  static int words(int head_dim) { return head_dim / Kind::kElements; }  // of a part

  // How many rows the lanes are divided among; 0 where panels are better, which may depend on whether rows are gapless:
  // whether each follows the one before it.
  static int count(int rows, int head_dim, [[maybe_unused]] bool gapless) {
    if (keys_taken == Keys::kInPanels) return 0;
    int lanes = 1;
    while (lanes < rows || words(head_dim) * lanes % kLanes) lanes *= 2;
    return lanes <= Kind::kLaneRows ? lanes : 0;
  }
  // Words of the rows of a head, as `score` takes them.
  static int size(int lanes, int head_dim) {
    return kLanes * Kind::kHead + Kind::kQueryParts * words(head_dim) * lanes;
  }

  // Adds a packed row.
  static void add(const std::uint32_t* row, int r, int lanes, int head_dim, std::uint32_t* out) {
    with_rows(lanes, [&]<int kRows>() {
      constexpr int kEach = kLanes / kRows;
      const int part = words(head_dim);
      for (int i = 0; i < Kind::kHead; ++i) out[kLanes * i + r * kEach] = *row++;
      out += kLanes * Kind::kHead;
      for (int p = 0; p < Kind::kQueryParts; ++p, row += part, out += part * kRows)
        for (int i = 0; i < part; i += kEach) std::memcpy(out + i * kRows + r * kEach, row + i, sizeof(*row) * kEach);
    });
  }

  // The scores of `count` keys. What lies `ahead` bytes behind each line of them is fetched, of gapless rows in its
  // order where that is faster.
  template <class Rows>
  static void score(int lanes, const Rows& keys, int count, int head_dim, const std::uint32_t* queries,
                    const float* factor, std::int64_t ahead, [[maybe_unused]] bool gapless, float* scores) {
    with_rows(lanes, [&]<int kRows>() {
      if constexpr (Kind::kOrdered == 4 && !std::is_same_v<Rows, Paged>)
        if (gapless) return score_rows<kRows, true>(keys, count, head_dim, queries, factor, ahead, scores);
      score_rows<kRows, false>(keys, count, head_dim, queries, factor, ahead, scores);
    });
  }

 private:
  // Calls a function with a count of lanes as its template argument.
  template <class Function>
  static void with_rows(int lanes, const Function& function) {
    switch (lanes) {
      case 1:
        return function.template operator()<1>();
      case 2:
        return function.template operator()<2>();
      case 4:
        return function.template operator()<4>();
      case 8:
        if constexpr (Kind::kLaneRows >= 8) function.template operator()<8>();
        break;
      case 16:
        if constexpr (Kind::kLaneRows >= 16) function.template operator()<16>();
        break;
    }
  }

  // Inlined by force: GCC does not, once there are two of them, and then computes listed rows 1.15 times as slowly.
  template <int kRows, bool kInOrder, class Rows>
  [[gnu::always_inline]] static void score_rows(const Rows& keys, int count, int head_dim, const std::uint32_t* queries,
                                                const float* factor, std::int64_t ahead, float* scores) {
    using Isa = typename Kind::Isa;
    constexpr int kKeys = 8, kBytes = 4 * kLanes / kRows;  // keys at a time; what a step reads of each
    constexpr int kSteps = kLine / kBytes;
    const int bytes = 4 * words(head_dim), part = words(head_dim) * kRows;
    for (int i = 0; i < count; i += kLanes) {
      typename Isa::F sums[kLanes];
#pragma GCC unroll 2
      for (int first = 0; first < kLanes; first += kKeys) {
#pragma GCC unroll 8
        for (int j = 0; j < kKeys; ++j) sums[first + j] = Isa::zero();
        if (i + first >= count) break;
        typename Kind::LaneSum sum[kKeys];
        const std::byte* row[kKeys];
#pragma GCC unroll 8
        for (int j = 0; j < kKeys; ++j) {
          row[j] = keys[smaller(i + first + j, count - 1)];
          sum[j].start(queries);
        }
        const std::uint32_t* q = queries + kLanes * Kind::kHead;
        const auto step = [&](int at) {
#pragma GCC unroll 8
          for (int j = 0; j < kKeys; ++j) sum[j].step(q, part, Isa::template repeat<kRows>(row[j] + at));
          q += kLanes;
        };
        int at = 0;
        for (; at + kLine <= bytes; at += kLine)
#pragma GCC unroll 16
          for (int s = 0; s < kSteps; ++s) {
#pragma GCC unroll 8
            for (int j = s * kKeys / kSteps; j < (s + 1) * kKeys / kSteps; ++j)
              fetch(kInOrder ? row[0] + ahead + at * kKeys + j * kLine : row[j] + ahead + at);
            step(at + s * kBytes);
          }
        for (; at < bytes; at += kBytes) step(at);
#pragma GCC unroll 8
        for (int j = 0; j < kKeys; ++j) sums[first + j] = sum[j].finish();
      }
      by_rows<Kind, kRows>(sums);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        if constexpr (Kind::kScaled) sums[r] = Kind::scaled(sums[r], factor[r]);
        Isa::store(scores + r * kBlock + i, sums[r], kLanes);
      }
    }
  }
};

}  // namespace
}  // namespace vattn::kernels
