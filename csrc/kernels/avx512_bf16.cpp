// AVX-512 with products of bfloat16 pairs and of 8-bit quads.
#include "avx512.h"
#include "layer_rows.h"
#include "tile.h"

namespace vattn::kernels {
namespace {

struct Bf16 : Avx512 {
  // Sixteen elements of four bytes; those past `count` are zero and not read.
  static F dwords(const std::byte* at, int count) {
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi32(some(count), at));
  }
};

// Two neighbours of bfloat16 per element.
struct Pairs {
  using Isa = Bf16;
  using F = Isa::F;
  static constexpr int kElements = 2;
  static constexpr int kTokens = 2;
  static constexpr bool kScaled = false;

  struct Product : PlainProduct<Isa> {
    static F step(F sum, const std::uint32_t* a, int, F b) {
      const __m512bh pairs = (__m512bh)_mm512_set1_epi32(static_cast<int>(*a));
      return _mm512_dpbf16_ps(sum, pairs, (__m512bh)b);
    }
  };
  using ForKeys = Product;
  using ForValues = Product;

  static int query_stride(int head_dim) { return head_dim / 2; }
  static int query_gap(int) { return 0; }
  static constexpr int kWeightGap = 0;
  static float pack_query(const Attention& a, const std::byte* row, std::uint32_t* out) {
    std::memcpy(out, row, static_cast<std::size_t>(a.head_dim) * 2);
    return 1;
  }
  static F keys(const std::byte* row, int first, int count) { return Isa::dwords(row + 2 * first, count); }
  static void values(const std::byte* const* rows, int present, int first, int rest, F (&out)[2]) {
    const __m512i even = _mm512_castps_si512(Isa::dwords(rows[0] + 2 * first, rest / 2));
    const __m512i odd = _mm512_castps_si512(Isa::dwords(rows[1] + 2 * first, present == 2 ? rest / 2 : 0));
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
  static float pack_weights(const float* weights, int vectors, std::uint32_t* out) {
    for (int i = 0; i < vectors; ++i)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out) + i,
                          (__m256i)_mm512_cvtneps_pbh(Isa::load(weights + i * Isa::kLanes)));
    return 1;
  }
  static int weight_steps(int count) { return ceil_div(count, 2); }
};

// Four neighbouring codes per element. The other operand is an integer of sixteen bits, with a factor per row, in two
// products of eight bits each: 256 * high + low. A row of it is what the two sums start from, then all high bytes, then
// all low ones.
struct Quads {
  using Isa = Bf16;
  using F = Isa::F;
  static constexpr int kElements = 4;
  static constexpr int kTokens = 4;
  static constexpr bool kScaled = true;
  static constexpr int kHead = 2;

  struct Product {
    using Isa = Bf16;
    static constexpr int kMaxRows = 7;
    static constexpr int columns(int rows) { return rows <= 3 ? 4 : 2; }
    struct Sum {
      __m512i high, low;
    };
    static Sum start(const std::uint32_t* a) { return {broadcast(a[0]), broadcast(a[1])}; }
    static __m512i broadcast(std::uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
    static F finish(Sum sum, float factor) {
      const F high = _mm512_cvtepi32_ps(sum.high), low = _mm512_cvtepi32_ps(sum.low);
      return Isa::mul(Isa::fma(high, Isa::set(256), low), Isa::set(factor));
    }
  };
  // Queries are signed, so the codes of keys have to be unsigned: 128 is added, and taken off by where the sums start.
  struct ForKeys : Product {
    static Sum step(Sum sum, const std::uint32_t* a, int gap, F b) {
      const __m512i codes = _mm512_castps_si512(b);
      return {_mm512_dpbusd_epi32(sum.high, codes, broadcast(a[kHead])),
              _mm512_dpbusd_epi32(sum.low, codes, broadcast(a[kHead + gap]))};
    }
  };
  struct ForValues : Product {
    static Sum step(Sum sum, const std::uint32_t* a, int gap, F b) {
      const __m512i codes = _mm512_castps_si512(b);
      return {_mm512_dpbusd_epi32(sum.high, broadcast(a[kHead]), codes),
              _mm512_dpbusd_epi32(sum.low, broadcast(a[kHead + gap]), codes)};
    }
  };

  static int query_stride(int head_dim) { return kHead + head_dim / 2; }
  static int query_gap(int head_dim) { return head_dim / 4; }
  static constexpr int kWeightGap = kBlock / 4;

  static float pack_query(const Attention& a, const std::byte* row, std::uint32_t* out) {
    const auto load = [&](int i) {
      return widen<Isa>(a.query_type, row + i * size_of(a.query_type), smaller(Isa::kLanes, a.head_dim - i));
    };
    F most = Isa::zero(), poison = Isa::zero();
    for (int i = 0; i < a.head_dim; i += Isa::kLanes) {
      most = Isa::max(most, _mm512_abs_ps(load(i)));
      poison = Isa::fma(load(i), Isa::zero(), poison);
    }
    constexpr float kLargest = 127 * 256;
    const float largest = Isa::largest(most);
    const F inverse = Isa::set(largest > 0 ? kLargest / largest : 0);
    std::byte* high = reinterpret_cast<std::byte*>(out + kHead);
    std::byte* low = high + a.head_dim;
    __m512i high_sum = _mm512_setzero_si512(), low_sum = _mm512_setzero_si512();
    for (int i = 0; i < a.head_dim; i += Isa::kLanes) {
      const __mmask16 mask = Isa::some(a.head_dim - i);
      const __m512i x = _mm512_cvtps_epi32(Isa::mul(load(i), inverse));
      const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(128)), 8);
      const __m512i lower = _mm512_sub_epi32(x, _mm512_slli_epi32(upper, 8));
      _mm512_mask_cvtepi32_storeu_epi8(high + i, mask, upper);
      _mm512_mask_cvtepi32_storeu_epi8(low + i, mask, lower);
      high_sum = _mm512_add_epi32(high_sum, upper);
      low_sum = _mm512_add_epi32(low_sum, lower);
    }
    out[0] = static_cast<std::uint32_t>(-128 * _mm512_reduce_add_epi32(high_sum));
    out[1] = static_cast<std::uint32_t>(-128 * _mm512_reduce_add_epi32(low_sum));
    return largest / kLargest + Isa::sum(poison);
  }

  static F keys(const std::byte* row, int first, int count) {
    const __m512i codes = _mm512_castps_si512(Isa::dwords(row + first, count));
    return _mm512_castsi512_ps(_mm512_xor_si512(codes, _mm512_set1_epi8(-128)));
  }

  static void values(const std::byte* const* rows, int present, int first, int rest, F (&out)[4]) {
    __m512i x[4];
    for (int i = 0; i < 4; ++i) x[i] = _mm512_castps_si512(Isa::dwords(rows[i] + first, i < present ? rest / 4 : 0));
    const __m512i low = _mm512_unpacklo_epi8(x[0], x[1]), low2 = _mm512_unpacklo_epi8(x[2], x[3]);
    const __m512i high = _mm512_unpackhi_epi8(x[0], x[1]), high2 = _mm512_unpackhi_epi8(x[2], x[3]);
    out[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(low, low2));
    out[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(low, low2));
    out[2] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(high, high2));
    out[3] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(high, high2));
  }
  // Unpacking goes by groups of sixteen elements, of which each vector has four.
  static void order(F (&x)[4]) {
    const F low = _mm512_shuffle_f32x4(x[0], x[1], 0x44), high = _mm512_shuffle_f32x4(x[0], x[1], 0xee);
    const F low2 = _mm512_shuffle_f32x4(x[2], x[3], 0x44), high2 = _mm512_shuffle_f32x4(x[2], x[3], 0xee);
    x[0] = _mm512_shuffle_f32x4(low, low2, 0x88);
    x[1] = _mm512_shuffle_f32x4(low, low2, 0xdd);
    x[2] = _mm512_shuffle_f32x4(high, high2, 0x88);
    x[3] = _mm512_shuffle_f32x4(high, high2, 0xdd);
  }

  static float pack_weights(const float* weights, int vectors, std::uint32_t* out) {
    F most = Isa::zero(), poison = Isa::zero();
    for (int i = 0; i < vectors; ++i) {
      const F x = Isa::load(weights + i * Isa::kLanes);
      most = Isa::max(most, x);
      poison = Isa::fma(x, Isa::zero(), poison);
    }
    constexpr float kLargest = 65535;
    const float largest = Isa::largest(most);
    const F inverse = Isa::set(largest > 0 ? kLargest / largest : 0);
    out[0] = out[1] = 0;
    std::byte* high = reinterpret_cast<std::byte*>(out + kHead);
    std::byte* low = high + kBlock;
    for (int i = 0; i < vectors; ++i) {
      const __m512i x = _mm512_cvtps_epu32(Isa::mul(Isa::load(weights + i * Isa::kLanes), inverse));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(high) + i, _mm512_cvtepi32_epi8(_mm512_srli_epi32(x, 8)));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(low) + i, _mm512_cvtepi32_epi8(x));
    }
    return largest / kLargest + Isa::sum(poison);
  }
  static int weight_steps(int count) { return ceil_div(count, 4); }
};

bool supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}

}  // namespace

extern const Kernels avx512_bf16_kernels;
const Kernels avx512_bf16_kernels{"avx512_bf16",
                                  "AVX-512 (F, BW, DQ, VL) with BF16 and VNNI",
                                  Bf16::kLanes,
                                  supported,
                                  attend_any<Bf16, Pairs, Quads>,
                                  merge_rows<Bf16>,
                                  layer_row<Bf16, Norm>,
                                  layer_row<Bf16, Rotation>,
                                  layer_row<Bf16, Gate>};

}  // namespace vattn::kernels
