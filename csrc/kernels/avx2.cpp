// Vectors of eight floats.
#include <immintrin.h>

#include "layer_rows.h"
#include "linear_tile.h"
#include "roofline_loops.h"
#include "widened.h"

namespace vattn::kernels {
namespace {

struct Avx2 {
  using F = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kMaxRows = 6, kMaxRowsInPlace = 6;
  static constexpr int columns(int rows) { return rows <= 2 ? 4 : rows == 3 ? 3 : 2; }
  // Pairs take two registers, for their first and their second elements.
  static constexpr int kMaxRowsOfPairs = 4;
  static constexpr int columns_of_pairs(int rows) { return rows == 1 ? 4 : 2; }
  // Fewest rows for which pairs become floats once for all of them: of keys, and of weights.
  static constexpr int kFloatPanels = 9;
  static constexpr int kFloatWeights = 128;
  static constexpr int kOrdered = 4;  // see `Floats`

  static __m256i lanes() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
  static __m256i some(int count) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lanes()); }

  static F zero() { return _mm256_setzero_ps(); }
  static F set(float x) { return _mm256_set1_ps(x); }
  static F load(const float* at) { return _mm256_loadu_ps(at); }
  static F load_some(const float* at, int count) { return _mm256_maskload_ps(at, some(count)); }
  static F broadcast(const float* at) { return _mm256_broadcast_ss(at); }
  static void store(float* at, F x, int count) {
    if (count == kLanes)
      _mm256_storeu_ps(at, x);
    else
      _mm256_maskstore_ps(at, some(count), x);
  }
  // Eight elements of four bytes; those past `count` are zero and not read.
  static F dwords(const std::byte* at, int count) {
    return _mm256_maskload_ps(reinterpret_cast<const float*>(at), some(count));
  }
  static F add(F x, F y) { return _mm256_add_ps(x, y); }
  static F sub(F x, F y) { return _mm256_sub_ps(x, y); }
  static F mul(F x, F y) { return _mm256_mul_ps(x, y); }
  static F div(F x, F y) { return _mm256_div_ps(x, y); }
  static F fma(F x, F y, F z) { return _mm256_fmadd_ps(x, y, z); }
  static F min(F x, F y) { return _mm256_min_ps(x, y); }
  static F max(F x, F y) { return _mm256_max_ps(x, y); }
  static float sum(F x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
  }
  static float largest(F x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
  }
  static float first(F x) { return _mm256_cvtss_f32(x); }

  // -inf outside of lanes [first, last).
  static F hide(F x, int first, int last) {
    const __m256 shown = _mm256_castsi256_ps(_mm256_andnot_si256(some(first), some(last)));
    return _mm256_blendv_ps(set(-__builtin_inff()), x, shown);
  }

  static F exp2(F x) {
    // 2^128 is infinite. In this order NaN stays NaN.
    x = _mm256_max_ps(set(-200), _mm256_min_ps(set(128), x));
    const F whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const F rest = _mm256_sub_ps(x, whole);
    F y = set(kExp2[0]);
#pragma GCC unroll 8
    for (int i = 1; i < 7; ++i) y = fma(y, rest, set(kExp2[i]));
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23);
    y = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(y), exponent));
    // What is less than a normal number is 0.
    return _mm256_andnot_ps(_mm256_cmp_ps(x, set(-126), _CMP_LT_OQ), y);
  }

  // Bytes past `count` elements are not read.
  template <int kSize>
  static __m128i partial(const std::byte* at, int count) {
    alignas(16) std::byte room[16] = {};
    for (int i = 0; i < count * kSize; ++i) room[i] = at[i];
    return _mm_load_si128(reinterpret_cast<const __m128i*>(room));
  }

  template <Type kType>
  static F widen(const std::byte* at, int count) {
    if constexpr (kType == Type::kFloat32) {
      const float* from = reinterpret_cast<const float*>(at);
      return count == kLanes ? _mm256_loadu_ps(from) : _mm256_maskload_ps(from, some(count));
    } else if constexpr (kType == Type::kInt8) {
      const __m128i codes =
          count == kLanes ? _mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)) : partial<1>(at, count);
      return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
    } else {
      const __m128i bits =
          count == kLanes ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)) : partial<2>(at, count);
      if constexpr (kType == Type::kFloat16) return _mm256_cvtph_ps(bits);
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    }
  }

  template <Type kType>
  static void narrow(std::byte* at, F x, int count) {
    if constexpr (kType == Type::kFloat32) {
      store(reinterpret_cast<float*>(at), x, count);
      return;
    }
    __m128i bits;
    if constexpr (kType == Type::kFloat16) {
      bits = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    } else {
      // To the nearest, ties to even; NaN keeps its high bits, one of which is set so that it stays NaN.
      const __m256i all = _mm256_castps_si256(x);
      const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(all, 16), _mm256_set1_epi32(1));
      const __m256i rounded = _mm256_add_epi32(all, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
      const __m256i kept = _mm256_or_si256(all, _mm256_set1_epi32(0x00400000));
      const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
      const __m256i chosen = _mm256_srli_epi32(
          _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(kept), nan)), 16);
      bits = _mm_packus_epi32(_mm256_castsi256_si128(chosen), _mm256_extracti128_si256(chosen, 1));
    }
    if (count == kLanes) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(at), bits);
    } else {
      alignas(16) std::byte room[16];
      _mm_store_si128(reinterpret_cast<__m128i*>(room), bits);
      for (int i = 0; i < 2 * count; ++i) at[i] = room[i];
    }
  }

  // Of pairs of bfloat16: the first ones, or the second, as floats.
  static F even(F pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs), 16)); }
  static F odd(F pairs) {
    return _mm256_and_ps(pairs, _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xffff0000))));
  }
  // Two vectors become their even lanes and their odd ones; and back.
  static void separate(F& x, F& y) {
    const __m256d even = _mm256_castps_pd(_mm256_shuffle_ps(x, y, 0x88));
    const __m256d odd = _mm256_castps_pd(_mm256_shuffle_ps(x, y, 0xdd));
    x = _mm256_castpd_ps(_mm256_permute4x64_pd(even, 0xd8));
    y = _mm256_castpd_ps(_mm256_permute4x64_pd(odd, 0xd8));
  }
  static void interleave(F& x, F& y) {
    const F low = _mm256_unpacklo_ps(x, y), high = _mm256_unpackhi_ps(x, y);
    x = _mm256_permute2f128_ps(low, high, 0x20);
    y = _mm256_permute2f128_ps(low, high, 0x31);
  }

  // As many bytes as each of `kRows` rows has lanes for, once for each of them.
  template <int kRows>
  static F repeat(const std::byte* at) {
    if constexpr (kRows == 1)
      return _mm256_loadu_ps(reinterpret_cast<const float*>(at));
    else if constexpr (kRows == 2)
      return _mm256_castsi256_ps(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
    else if constexpr (kRows == 4)
      return _mm256_castsi256_ps(_mm256_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
    else
      return _mm256_broadcast_ss(reinterpret_cast<const float*>(at));
  }
  // Every second lane of two vectors within groups of four, or every second group: the even or the odd ones.
  template <int kLevel, bool kOdd>
  static F half(F x, F y) {
    if constexpr (kLevel < 2)
      return _mm256_shuffle_ps(x, y, kOdd ? 0xdd : 0x88);
    else
      return _mm256_permute2f128_ps(x, y, kOdd ? 0x31 : 0x20);
  }

  // Element j of vector i becomes element i of vector j.
  static void transpose(F (&x)[8]) {
    F y[8];
#pragma GCC unroll 8
    for (int i = 0; i < 4; ++i) {
      y[2 * i] = _mm256_unpacklo_ps(x[2 * i], x[2 * i + 1]);
      y[2 * i + 1] = _mm256_unpackhi_ps(x[2 * i], x[2 * i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 2; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < 2; ++j) {
        x[4 * i + 2 * j] = _mm256_shuffle_ps(y[4 * i + j], y[4 * i + 2 + j], 0x44);
        x[4 * i + 2 * j + 1] = _mm256_shuffle_ps(y[4 * i + j], y[4 * i + 2 + j], 0xee);
      }
#pragma GCC unroll 8
    for (int j = 0; j < 4; ++j) {
      y[j] = _mm256_permute2f128_ps(x[j], x[4 + j], 0x20);
      y[4 + j] = _mm256_permute2f128_ps(x[j], x[4 + j], 0x31);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) x[i] = y[i];
  }
};

bool supported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

}  // namespace

extern const Kernels avx2_kernels;
constinit const Kernels avx2_kernels{
    .name = "avx2",
    .needs = "AVX2, FMA and F16C",
    .base = nullptr,
    .lanes = Avx2::kLanes,
    .supported = supported,
    .worthwhile = nullptr,
    .panels_are_faster = nullptr,
    .linear_layers = true,
    .attend = {attend_items<Floats<Avx2, Type::kFloat32>>, attend_items<Widened<Avx2>>,
               attend_items<Floats<Avx2, Type::kFloat16>>, attend_items<Floats<Avx2, Type::kInt8>>},
    .merge = merge_rows<Avx2>,
    .norm = layer_row<Avx2, Norm>,
    .rotation = layer_row<Avx2, Rotation>,
    .gate = layer_row<Avx2, Gate>,
    .linear_row = widen_row<Widened<Avx2>>,
    .linear = linear_item<Widened<Avx2>>,
    .products = {product_loop<Floats<Avx2, Type::kFloat32>>, product_loop<Floats<Avx2, Type::kBFloat16>>,
                 product_loop<Floats<Avx2, Type::kFloat16>>, product_loop<Floats<Avx2, Type::kInt8>>},
    .read = read_loop<Avx2>};

}  // namespace vattn::kernels
