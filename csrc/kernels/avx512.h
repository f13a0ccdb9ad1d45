// Vectors of sixteen floats.
#pragma once

#include <immintrin.h>

#include "attention.h"
#include "tile.h"

namespace vattn::kernels {
namespace {

struct Avx512 {
  using F = __m512;
  static constexpr int kLanes = 16;
  // Tiles of rows by vectors whose sums stay in the 32 registers.
  static constexpr int kMaxRows = 8;
  static constexpr int kOrdered = 0;  // of vectors that are less than a line; see `Floats`
  // Four vectors of values that lie side by side are read at once, which memory likes better than two and two.
  static constexpr int kMaxRowsInPlace = 7;
  static constexpr int columns(int rows) { return rows <= 7 ? 4 : 2; }
  static constexpr int kMaxRowsOfPairs = 8;
  static constexpr int columns_of_pairs(int rows) { return rows <= 4 ? 4 : 2; }
  // Pairs never become floats before they are multiplied: there are registers for both.
  static constexpr int kFloatPanels = 0;
  static constexpr int kFloatWeights = 0;

  static __mmask16 some(int count) {
    return static_cast<__mmask16>(count <= 0 ? 0 : count >= kLanes ? 0xffff : (1u << count) - 1);
  }

  static F zero() { return _mm512_setzero_ps(); }
  static F set(float x) { return _mm512_set1_ps(x); }
  static F load(const float* at) { return _mm512_loadu_ps(at); }
  static F load_some(const float* at, int count) { return _mm512_maskz_loadu_ps(some(count), at); }
  static F broadcast(const float* at) { return _mm512_set1_ps(*at); }
  static void store(float* at, F x, int count) {
    if (count == kLanes)
      _mm512_storeu_ps(at, x);
    else
      _mm512_mask_storeu_ps(at, some(count), x);
  }
  // Sixteen elements of four bytes; those past `count` are zero and not read.
  static F dwords(const std::byte* at, int count) {
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi32(some(count), at));
  }
  static F add(F x, F y) { return _mm512_add_ps(x, y); }
  static F sub(F x, F y) { return _mm512_sub_ps(x, y); }
  static F mul(F x, F y) { return _mm512_mul_ps(x, y); }
  static F div(F x, F y) { return _mm512_div_ps(x, y); }
  static F fma(F x, F y, F z) { return _mm512_fmadd_ps(x, y, z); }
  static F min(F x, F y) { return _mm512_min_ps(x, y); }
  static F max(F x, F y) { return _mm512_max_ps(x, y); }
  static float sum(F x) { return _mm512_reduce_add_ps(x); }
  static float largest(F x) { return _mm512_reduce_max_ps(x); }
  static float first(F x) { return _mm512_cvtss_f32(x); }

  // -inf outside of lanes [first, last).
  static F hide(F x, int first, int last) {
    return _mm512_mask_mov_ps(set(-__builtin_inff()), some(last) & static_cast<__mmask16>(~some(first)), x);
  }

  static F exp2(F x) { return exp2(x, kExp2); }
  template <int kTerms>
  static F exp2(F x, const float (&coefficients)[kTerms]) {
    // What is less than a normal number is 0: a result between them takes the CPU a hundred cycles. NaN stays NaN.
    const __mmask16 normal = _mm512_cmp_ps_mask(x, set(-126), _CMP_NLT_UQ);
    const F whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const F rest = _mm512_sub_ps(x, whole);
    F y = set(coefficients[0]);
#pragma GCC unroll 8
    for (int i = 1; i < kTerms; ++i) y = fma(y, rest, set(coefficients[i]));
    return _mm512_maskz_scalef_ps(normal, y, whole);
  }

  // Whole vectors without a mask: storing with one takes a Zen 5 several cycles, and it has to be computed.
  static __m256i load_halves(const std::byte* at, int count) {
    if (count == kLanes) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    return _mm256_maskz_loadu_epi16(some(count), at);
  }
  static void store_halves(std::byte* at, __m256i x, int count) {
    if (count == kLanes)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), x);
    else
      _mm256_mask_storeu_epi16(at, some(count), x);
  }

  template <Type kType>
  static F widen(const std::byte* at, int count) {
    if constexpr (kType == Type::kFloat32) {
      return _mm512_maskz_loadu_ps(some(count), at);
    } else if constexpr (kType == Type::kInt8) {
      return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(some(count), at)));
    } else {
      const __m256i bits = load_halves(at, count);
      if constexpr (kType == Type::kFloat16) return _mm512_cvtph_ps(bits);
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
  }

  template <Type kType>
  static void narrow(std::byte* at, F x, int count) {
    if constexpr (kType == Type::kFloat32) {
      store(reinterpret_cast<float*>(at), x, count);
    } else if constexpr (kType == Type::kFloat16) {
      store_halves(at, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), count);
    } else {
      // To the nearest, ties to even; NaN keeps its high bits, one of which is set so that it stays NaN.
      const __m512i bits = _mm512_castps_si512(x);
      const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
      const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
      const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
      const __m512i kept = _mm512_or_si512(bits, _mm512_set1_epi32(0x00400000));
      const __m512i chosen = _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, kept), 16);
      store_halves(at, _mm512_cvtepi32_epi16(chosen), count);
    }
  }

  // Of pairs of bfloat16: the first ones, or the second, as floats.
  static F even(F pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs), 16)); }
  static F odd(F pairs) {
    return _mm512_and_ps(pairs, _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(0xffff0000))));
  }
  // Two vectors become their even lanes and their odd ones; and back.
  static void separate(F& x, F& y) {
    const __m512i order = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const F first = _mm512_permutex2var_ps(x, order, y);
    y = _mm512_permutex2var_ps(x, _mm512_add_epi32(order, _mm512_set1_epi32(1)), y);
    x = first;
  }
  static void interleave(F& x, F& y) {
    const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const F first = _mm512_permutex2var_ps(x, low, y);
    y = _mm512_permutex2var_ps(x, _mm512_add_epi32(low, _mm512_set1_epi32(8)), y);
    x = first;
  }

  // As many bytes as each of `kRows` rows has lanes for, once for each of them. These are the loads that take no other
  // part of the CPU, unlike those of floats.
  template <int kRows>
  static F repeat(const std::byte* at) {
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
  static F half(F x, F y) {
    constexpr int kOrder = kOdd ? 0xdd : 0x88;
    if constexpr (kLevel < 2)
      return _mm512_shuffle_ps(x, y, kOrder);
    else
      return _mm512_shuffle_f32x4(x, y, kOrder);
  }

  // Element j of vector i becomes element i of vector j.
  static void transpose(F (&x)[16]) {
    F y[16];
#pragma GCC unroll 16
    for (int i = 0; i < 8; ++i) {
      y[2 * i] = _mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]);
      y[2 * i + 1] = _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]);
    }
    // x[4 i + j]: in each group of four lanes, element j of that group of rows 4 i to 4 i + 3.
#pragma GCC unroll 16
    for (int i = 0; i < 4; ++i) {
      const auto pd = [&](int k) { return _mm512_castps_pd(y[4 * i + k]); };
      x[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(0), pd(2)));
      x[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(0), pd(2)));
      x[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(1), pd(3)));
      x[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(1), pd(3)));
    }
#pragma GCC unroll 16
    for (int j = 0; j < 4; ++j) {
      const F low = _mm512_shuffle_f32x4(x[j], x[4 + j], 0x88), low2 = _mm512_shuffle_f32x4(x[8 + j], x[12 + j], 0x88);
      const F high = _mm512_shuffle_f32x4(x[j], x[4 + j], 0xdd);
      const F high2 = _mm512_shuffle_f32x4(x[8 + j], x[12 + j], 0xdd);
      y[j] = _mm512_shuffle_f32x4(low, low2, 0x88);
      y[8 + j] = _mm512_shuffle_f32x4(low, low2, 0xdd);
      y[4 + j] = _mm512_shuffle_f32x4(high, high2, 0x88);
      y[12 + j] = _mm512_shuffle_f32x4(high, high2, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) x[i] = y[i];
  }
};

// Values of two tokens at a time, whose words are multiplied as pairs.
struct TokenPairs {
  using F = Avx512::F;
  static constexpr int kTokens = 2;
  static constexpr int kMultiple = 2;
  static constexpr int kRowMultiple = 1;
  static constexpr int kVectors = 2;

  static void unpack(__m512i even, __m512i odd, F (&out)[2]) {
    out[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(even, odd));
    out[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(even, odd));
  }
  // Unpacking goes by groups of eight elements, of which the first vector has the lower halves.
  static void order(F (&x)[2]) {
    const __m512i low = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const F first = _mm512_permutex2var_ps(x[0], low, x[1]);
    x[1] = _mm512_permutex2var_ps(x[0], _mm512_add_epi32(low, _mm512_set1_epi32(8)), x[1]);
    x[0] = first;
  }
  // Weights are rounded to words, which leaves an error of 2e-3 or 1.5e-5; that of the polynomial is 3e-6.
  static F exp2(F x) {
    constexpr float kCoefficients[] = {9.582853e-3f, 5.5906426e-2f, 2.4024099e-1f, 6.931242e-1f, 1};
    return Avx512::exp2(x, kCoefficients);
  }
};

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

}  // namespace

extern const Kernels avx512_kernels, avx512_vnni_kernels, avx512_bf16_kernels, amx_bf16_kernels;

}  // namespace vattn::kernels
