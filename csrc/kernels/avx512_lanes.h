// Scores of a few rows of queries by vectors of sixteen lanes, with keys as they lie.
//
// The rows share the lanes: each has `16 / rows` neighbouring lanes, for as many neighbouring elements. Keys need not
// be transposed then: what a step reads of a key is repeated for every row by the load itself. The lanes of a row are
// added at the end, for sixteen keys at once. With more than sixteen rows, panels take fewer products.
#pragma once

#include "avx512.h"

namespace vattn::kernels {
namespace {

// As many bytes of a key as each of `kRows` rows has lanes for, once for each of them. These are the loads that take no
// other part of the CPU, unlike those of floats.
template <int kRows>
__m512 for_rows(const std::byte* at) {
  if constexpr (kRows == 1)
    return _mm512_loadu_ps(at);
  else if constexpr (kRows == 2)
    return _mm512_castsi512_ps(_mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))));
  else if constexpr (kRows == 4)
    return _mm512_castsi512_ps(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
  else if constexpr (kRows == 8)
    return _mm512_castsi512_ps(_mm512_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
  else
    return _mm512_castsi512_ps(_mm512_broadcastd_epi32(_mm_loadu_si32(at)));
}

// Every second lane of two vectors within groups of four, or every second group of two: the even or the odd ones.
template <int kLevel, bool kOdd>
__m512 half(__m512 x, __m512 y) {
  constexpr int kOrder = kOdd ? 0xdd : 0x88;
  if constexpr (kLevel < 2)
    return _mm512_shuffle_ps(x, y, kOrder);
  else
    return _mm512_shuffle_f32x4(x, y, kOrder);
}

// Sixteen vectors, one of each key, with the sums of `kRows` rows in parts, become a vector for each row, of the keys'
// sums. Each level takes a bit off the numbers of the lanes: first parts are added, then rows are told apart.
template <int kRows, int kLevel = 0, int kGroups = 1, int kVectors = 16>
void by_rows(__m512 (&x)[16]) {
  if constexpr (kLevel < 4) {
    constexpr bool kAdded = (kRows << kLevel) < 16;
    constexpr int kHalf = kGroups * kVectors / 2;
    __m512 y[16];
#pragma GCC unroll 16
    for (int i = 0; i < kHalf; ++i) {
      const __m512 even = half<kLevel, false>(x[2 * i], x[2 * i + 1]);
      const __m512 odd = half<kLevel, true>(x[2 * i], x[2 * i + 1]);
      if constexpr (kAdded) {
        y[i] = _mm512_add_ps(even, odd);
      } else {
        y[i] = even;
        y[i + kHalf] = odd;
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < (kAdded ? 1 : 2) * kHalf; ++i) x[i] = y[i];
    by_rows<kRows, kLevel + 1, kAdded ? kGroups : 2 * kGroups, kVectors / 2>(x);
  }
}

// `Kind` says what a sum is and how it starts and ends (`LaneSum`), of how many parts a packed row of queries is
// (`kQueryParts`, after `kHead` words), and up to how many rows this is worthwhile (`kLaneRows`).
template <class Kind>
struct RowLanes {
  static int words(int head_dim) { return head_dim / Kind::kElements; }  // of a part

  // How many rows the lanes are divided among; 0 where panels are better.
  static int count(int rows, int head_dim) {
    int lanes = 1;
    while (lanes < rows || words(head_dim) * lanes % 16) lanes *= 2;
    return lanes <= Kind::kLaneRows ? lanes : 0;
  }
  // Words of the rows of a head, as `score` takes them.
  static int size(int lanes, int head_dim) { return 16 * Kind::kHead + Kind::kQueryParts * words(head_dim) * lanes; }

  // Adds a packed row.
  static void add(const std::uint32_t* row, int r, int lanes, int head_dim, std::uint32_t* out) {
    with_rows(lanes, [&]<int kRows>() {
      constexpr int kEach = 16 / kRows;
      const int part = words(head_dim);
      for (int i = 0; i < Kind::kHead; ++i) out[16 * i + r * kEach] = *row++;
      out += 16 * Kind::kHead;
      for (int p = 0; p < Kind::kQueryParts; ++p, row += part, out += part * kRows)
        for (int i = 0; i < part; i += kEach) std::memcpy(out + i * kRows + r * kEach, row + i, sizeof(*row) * kEach);
    });
  }

  // The scores of `count` keys. What lies `ahead` bytes behind each line of them is fetched.
  template <class Rows>
  static void score(int lanes, const Rows& keys, int count, int head_dim, const std::uint32_t* queries,
                    const float* factor, std::int64_t ahead, float* scores) {
    with_rows(lanes, [&]<int kRows>() { score_rows<kRows>(keys, count, head_dim, queries, factor, ahead, scores); });
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

  template <int kRows, class Rows>
  static void score_rows(const Rows& keys, int count, int head_dim, const std::uint32_t* queries, const float* factor,
                         std::int64_t ahead, float* scores) {
    constexpr int kKeys = 8, kBytes = 64 / kRows;  // keys at a time; what a step reads of each
    const int bytes = 4 * words(head_dim), part = words(head_dim) * kRows;
    for (int i = 0; i < count; i += 16) {
      __m512 sums[16];
#pragma GCC unroll 2
      for (int first = 0; first < 16; first += kKeys) {
#pragma GCC unroll 8
        for (int j = 0; j < kKeys; ++j) sums[first + j] = _mm512_setzero_ps();
        if (i + first >= count) break;
        typename Kind::LaneSum sum[kKeys];
        const std::byte* row[kKeys];
#pragma GCC unroll 8
        for (int j = 0; j < kKeys; ++j) {
          row[j] = keys[smaller(i + first + j, count - 1)];
          sum[j].start(queries);
        }
        const std::uint32_t* q = queries + 16 * Kind::kHead;
        const auto step = [&](int at) {
#pragma GCC unroll 8
          for (int j = 0; j < kKeys; ++j) sum[j].step(q, part, for_rows<kRows>(row[j] + at));
          q += 16;
        };
        int at = 0;
        for (; at + 64 <= bytes; at += 64)
#pragma GCC unroll 16
          for (int s = 0; s < kRows; ++s) {
#pragma GCC unroll 8
            for (int j = s * kKeys / kRows; j < (s + 1) * kKeys / kRows; ++j) fetch(row[j] + ahead + at);
            step(at + s * kBytes);
          }
        for (; at < bytes; at += kBytes) step(at);
#pragma GCC unroll 8
        for (int j = 0; j < kKeys; ++j) sums[first + j] = sum[j].finish();
      }
      by_rows<kRows>(sums);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        if constexpr (Kind::kScaled) sums[r] = _mm512_mul_ps(sums[r], _mm512_set1_ps(factor[r]));
        _mm512_storeu_ps(scores + r * kBlock + i, sums[r]);
      }
    }
  }
};

}  // namespace
}  // namespace vattn::kernels
