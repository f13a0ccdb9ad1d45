// AVX-512 with products of 8-bit quads.
#include "avx512.h"
#include "roofline_loops.h"
#include "row_lanes.h"

namespace vattn::kernels {
namespace {

// Four neighbouring codes per element. The other operand is an integer of sixteen bits, with a factor per row, in two
// products of eight bits each: 256 * high + low. A row of it is what the two sums start from, then all high bytes, then
// all low ones.
struct Quads {
  using Isa = Avx512;
  using F = Isa::F;
  static constexpr int kElements = 4;
  static constexpr int kTokens = 4;
  static constexpr int kVectors = 4;
  static constexpr int kVectorBytes = 16;
  static constexpr bool kScaled = true;
  static constexpr int kFloatPanels = 0;
  static constexpr int kHead = 2;
  static constexpr float kTiny = 1e-30f;  // less counts as 0: its inverse may be infinite

  struct Product {
    using Isa = Avx512;
    static constexpr int kMaxRows = 7;
    static constexpr int columns(int rows) { return rows <= 3 ? 4 : rows <= 6 ? 2 : 1; }
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

  using Lanes = RowLanes<Quads>;
  static constexpr int kLaneRows = 4, kQueryParts = 2;
  struct LaneSum {
    Product::Sum sum;
    void start(const std::uint32_t* queries) {
      sum = {_mm512_loadu_si512(queries), _mm512_loadu_si512(queries + Isa::kLanes)};
    }
    void step(const std::uint32_t* queries, int part, F keys) {
      const __m512i codes = unsigned_codes(keys);
      sum = {_mm512_dpbusd_epi32(sum.high, codes, _mm512_loadu_si512(queries)),
             _mm512_dpbusd_epi32(sum.low, codes, _mm512_loadu_si512(queries + part))};
    }
    F finish() const { return Product::finish(sum, 1); }
  };

  static int query_stride(int head_dim) { return kHead + head_dim / 2; }
  static int query_gap(int head_dim) { return head_dim / 4; }
  static constexpr int kWeightGap = kBlock / 4;

  static float pack_query(const Attention& a, const std::byte* row, std::uint32_t* out) {
    return with_type(a.query_type, [&]<Type kType>() { return pack_query_of<kType>(a, row, out); });
  }
  template <Type kType>
  static float pack_query_of(const Attention& a, const std::byte* row, std::uint32_t* out) {
    const auto load = [&](int i) {
      return Isa::widen<kType>(row + i * size_of(kType), smaller(Isa::kLanes, a.head_dim - i));
    };
    F most = Isa::zero(), poison = Isa::zero();
    for (int i = 0; i < a.head_dim; i += Isa::kLanes) {
      most = Isa::max(most, _mm512_abs_ps(load(i)));
      poison = Isa::fma(load(i), Isa::zero(), poison);
    }
    constexpr float kLargest = 127 * 256;
    const float largest = Isa::largest(most);
    const F inverse = Isa::set(largest > kTiny ? kLargest / largest : 0);
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
    // Of a query with NaN they are too large, and wrap.
    out[0] = -128u * static_cast<std::uint32_t>(_mm512_reduce_add_epi32(high_sum));
    out[1] = -128u * static_cast<std::uint32_t>(_mm512_reduce_add_epi32(low_sum));
    return largest / kLargest + Isa::sum(poison);
  }

  static __m512i unsigned_codes(F codes) {
    return _mm512_xor_si512(_mm512_castps_si512(codes), _mm512_set1_epi8(-128));
  }
  static F keys(const std::byte* row, int first, int count) {
    return _mm512_castsi512_ps(unsigned_codes(Isa::dwords(row + first, count)));
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

  static F exp2(F x) { return Isa::exp2(x); }
  template <class Weight>
  static float pack_weights(int vectors, const Weight& weight, std::uint32_t* out) {
    F weights[kBlock / Isa::kLanes];
    F most = Isa::zero(), poison = Isa::zero();
    for (int i = 0; i < vectors; ++i) {
      const F x = weights[i] = weight(i);
      most = Isa::max(most, x);
      poison = Isa::fma(x, Isa::zero(), poison);
    }
    constexpr float kLargest = 65535;
    const float largest = Isa::largest(most);
    const F inverse = Isa::set(largest > kTiny ? kLargest / largest : 0);
    out[0] = out[1] = 0;
    std::byte* high = reinterpret_cast<std::byte*>(out + kHead);
    std::byte* low = high + kBlock;
    for (int i = 0; i < vectors; ++i) {
      const __m512i x = _mm512_cvtps_epu32(Isa::mul(weights[i], inverse));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(high) + i, _mm512_cvtepi32_epi8(_mm512_srli_epi32(x, 8)));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(low) + i, _mm512_cvtepi32_epi8(x));
    }
    return largest / kLargest + Isa::sum(poison);
  }
};

bool supported() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

}  // namespace

constinit const Kernels avx512_vnni_kernels{.name = "avx512_vnni",
                                            .needs = "AVX-512 (F, BW, DQ, VL) with VNNI",
                                            .base = &avx512_kernels,
                                            .lanes = Avx512::kLanes,
                                            .supported = supported,
                                            .worthwhile = nullptr,
                                            .linear_layers = true,
                                            .attend = {nullptr, nullptr, nullptr, attend_items<Quads>},
                                            .merge = nullptr,
                                            .norm = nullptr,
                                            .rotation = nullptr,
                                            .gate = nullptr,
                                            .linear_row = nullptr,
                                            .linear = nullptr,
                                            .products = {nullptr, nullptr, nullptr, product_loop<Quads>},
                                            .read = nullptr};

}  // namespace vattn::kernels
