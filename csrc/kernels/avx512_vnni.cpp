// AVX-512 with products of 8-bit quads.
#include "avx512.h"
#include "roofline_loops.h"
#include "row_lanes.h"

namespace vattn::kernels {
namespace {

bool panels_are_faster[2];  // for more than a few rows: of keys with gaps between them, and of gapless ones

// Codes are multiplied by integers of sixteen bits, which have a factor per row. Of keys, four neighbours are an
// element. Queries come as two bytes, 256 * high + low: a row is what the two sums start from, then all high bytes,
// then all low ones. Of values, an element is of two tokens, and weights come as they are.
struct Quads : TokenPairs {
  using Isa = Avx512;
  static constexpr int kElements = 4;
  static constexpr int kVectorBytes = 16;
  static constexpr int kOrdered = 2;
  static constexpr bool kScaled = true;
  static constexpr int kFloatPanels = 0;
  static constexpr int kHead = 2;
  static constexpr float kTiny = 1e-30f;  // less counts as 0: its inverse may be infinite

  // Sums are of integers, and pass for floats: of sums of another type than all other vectors, GCC keeps copies in
  // memory, which is why products are not written as intrinsics.
  static F broadcast(const std::uint32_t* at) { return _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(*at))); }
  static F converted(F sum) { return _mm512_cvtepi32_ps(_mm512_castps_si512(sum)); }
  static F added(F x, F y) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_castps_si512(y)));
  }
  static F scaled(F sum, float factor) { return Isa::mul(converted(sum), Isa::set(factor)); }

  // Queries are signed, so the codes of keys have to be unsigned: 128 is added, and taken off by where the sums start.
  struct ForKeys {
    using Isa = Avx512;
    static constexpr int kMaxRows = 7;
    static constexpr int columns(int rows) { return rows <= 3 ? 4 : 2; }
    struct Sum {
      F high, low;
    };
    static Sum start(const std::uint32_t* a) { return {broadcast(a), broadcast(a + 1)}; }
    static Sum step(Sum sum, const std::uint32_t* a, int gap, F b) {
      asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum.high) : "v"(b), "m"(a[kHead]));
      asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum.low) : "v"(b), "m"(a[kHead + gap]));
      return sum;
    }
    static F whole(Sum sum) {
      return added(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(sum.high), 8)), sum.low);
    }
    static F finish(Sum sum, float factor) { return scaled(whole(sum), factor); }
  };
  struct ForValues : PlainProduct<Isa> {
    static F step(F sum, const std::uint32_t* a, int, F b) {
      asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(b), "v"(broadcast(a)));
      return sum;
    }
    static F finish(F sum, float factor) { return scaled(sum, factor); }
  };

  struct Lanes : RowLanes<Quads> {
    // A Cascade Lake, which begins two products a cycle, is faster with panels: from five rows on over gapless keys,
    // from nine on over others. A Zen 4, which begins one, is not. Sums of integers are the same either way.
    static int count(int rows, int head_dim, bool gapless) {
      const bool panels = rows > (gapless ? 4 : 8) && panels_are_faster[gapless] && keys_taken == Keys::kFaster;
      return panels ? 0 : RowLanes::count(rows, head_dim, gapless);
    }
  };
  static constexpr int kLaneRows = 16, kQueryParts = 2;
  struct LaneSum {
    ForKeys::Sum sum;
    void start(const std::uint32_t* queries) { sum = {load(queries), load(queries + Isa::kLanes)}; }
    void step(const std::uint32_t* queries, int part, F keys) {
      const F codes = unsigned_codes(keys);
      sum = {product(sum.high, codes, load(queries)), product(sum.low, codes, load(queries + part))};
    }
    F finish() const { return ForKeys::whole(sum); }
    static F add(F x, F y) { return added(x, y); }
    static F product(F sum, F codes, F bytes) {
      asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(bytes));
      return sum;
    }
    static F load(const std::uint32_t* at) { return Isa::load(reinterpret_cast<const float*>(at)); }
  };

  static int query_stride(int head_dim) { return kHead + head_dim / 2; }
  static int query_gap(int head_dim) { return head_dim / 4; }

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
    // A sum of products with codes has 32 bits, so with heads of more than 512 a query has less than 16.
    const auto range = static_cast<float>(smaller(127 * 256, INT32_MAX / (128 * a.head_dim)));
    const float largest = Isa::largest(most);
    const F inverse = Isa::set(largest > kTiny ? range / largest : 0);
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
    return largest / range + Isa::sum(poison);
  }

  static F unsigned_codes(F codes) { return _mm512_xor_ps(codes, _mm512_castsi512_ps(_mm512_set1_epi8(-128))); }
  static F keys(const std::byte* row, int first, int count) { return unsigned_codes(Isa::dwords(row + first, count)); }

  static void values(const std::byte* const* rows, int present, int first, int rest, F (&out)[2]) {
    const auto words = [&](int i, int count) {
      const __mmask8 mask = static_cast<__mmask8>(Isa::some(count));
      return _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi32(mask, rows[i] + first));
    };
    const int count = smaller(8, rest / 4);
    const __m512i even = words(0, count), odd = words(1, present == 2 ? count : 0);
    unpack(even, odd, out);
  }

  template <class Weight>
  static float pack_weights(int vectors, const Weight& weight, std::uint32_t* out) {
    F weights[kBlock / Isa::kLanes];
    F most = Isa::zero(), poison = Isa::zero();
    for (int i = 0; i < vectors; ++i) {
      const F x = weights[i] = weight(i);
      most = Isa::max(most, x);
      poison = Isa::fma(x, Isa::zero(), poison);
    }
    constexpr float kLargest = 32767;
    const float largest = Isa::largest(most);
    const F inverse = Isa::set(largest > kTiny ? kLargest / largest : 0);
    for (int i = 0; i < vectors; ++i)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out) + i,
                          _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(Isa::mul(weights[i], inverse))));
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
                                            .panels_are_faster = panels_are_faster,
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
