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
  static constexpr int columns(int rows) { return rows <= 6 ? 4 : 2; }

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

  static F exp2(F x) {
    x = _mm512_max_ps(set(-200), x);  // in this order NaN stays NaN, and -inf becomes 0
    const F whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const F rest = _mm512_sub_ps(x, whole);
    F y = set(kExp2[0]);
#pragma GCC unroll 8
    for (int i = 1; i < 7; ++i) y = fma(y, rest, set(kExp2[i]));
    return _mm512_scalef_ps(y, whole);
  }

  template <Type kType>
  static F widen(const std::byte* at, int count) {
    const __mmask16 mask = some(count);
    if constexpr (kType == Type::kFloat32) {
      return _mm512_maskz_loadu_ps(mask, at);
    } else if constexpr (kType == Type::kInt8) {
      return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, at)));
    } else {
      const __m256i bits = _mm256_maskz_loadu_epi16(mask, at);
      if constexpr (kType == Type::kFloat16) return _mm512_cvtph_ps(bits);
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
  }

  template <Type kType>
  static void narrow(std::byte* at, F x, int count) {
    const __mmask16 mask = some(count);
    if constexpr (kType == Type::kFloat32) {
      _mm512_mask_storeu_ps(at, mask, x);
    } else if constexpr (kType == Type::kFloat16) {
      _mm256_mask_storeu_epi16(at, mask, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    } else {
      // To the nearest, ties to even; NaN keeps its high bits, one of which is set so that it stays NaN.
      const __m512i bits = _mm512_castps_si512(x);
      const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
      const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
      const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
      const __m512i kept = _mm512_or_si512(bits, _mm512_set1_epi32(0x00400000));
      const __m512i chosen = _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, kept), 16);
      _mm256_mask_storeu_epi16(at, mask, _mm512_cvtepi32_epi16(chosen));
    }
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

// Panels of two neighbours of bfloat16 per element, as they are stored.
template <class Isa_>
struct Neighbours {
  using Isa = Isa_;
  using F = typename Isa::F;
  static constexpr int kElements = 2;
  static constexpr bool kScaled = false;

  static F keys(const std::byte* row, int first, int count) { return Isa::dwords(row + 2 * first, count); }
};

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

}  // namespace

extern const Kernels avx512_kernels, avx512_vnni_kernels, avx512_bf16_kernels;

}  // namespace vattn::kernels
