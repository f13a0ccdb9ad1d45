// AVX-512 with products of floats.
#include "avx512_lanes.h"
#include "layer_rows.h"
#include "linear_tile.h"
#include "roofline_loops.h"

namespace vattn::kernels {
namespace {

// Neighbours that become floats in registers. A query is its even elements, then its odd ones; so are values.
struct Widened : Neighbours<Avx512> {
  static constexpr int kTokens = 1;
  static constexpr int kVectors = 2;
  static constexpr int kVectorBytes = 32;

  static F even(F pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs), 16)); }
  static F odd(F pairs) {
    return _mm512_and_ps(pairs, _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(0xffff0000))));
  }

  struct ForKeys : PlainProduct<Isa> {
    static constexpr int columns(int rows) { return rows <= 4 ? 4 : 2; }
    static F step(F sum, const std::uint32_t* a, int gap, F b) {
      sum = Isa::fma(Isa::broadcast(reinterpret_cast<const float*>(a)), even(b), sum);
      return Isa::fma(Isa::broadcast(reinterpret_cast<const float*>(a + gap)), odd(b), sum);
    }
  };
  using ForValues = FloatOperands<Avx512>::Product;

  using Lanes = RowLanes<Widened>;
  static constexpr int kLaneRows = 4, kQueryParts = 2, kHead = 0;
  struct LaneSum {
    F sum;
    void start(const std::uint32_t*) { sum = Isa::zero(); }
    void step(const std::uint32_t* queries, int part, F keys) {
      const float* q = reinterpret_cast<const float*>(queries);
      sum = Isa::fma(Isa::load(q + part), odd(keys), Isa::fma(Isa::load(q), even(keys), sum));
    }
    F finish() const { return sum; }
  };

  static int query_stride(int head_dim) { return head_dim; }
  static int query_gap(int head_dim) { return head_dim / 2; }
  static constexpr int kWeightGap = 0;
  static float pack_weights(const float* weights, int vectors, std::uint32_t* out) {
    return FloatOperands<Avx512>::pack_weights(weights, vectors, out);
  }

  static void values(const std::byte* const* rows, int, int first, int rest, F (&out)[2]) {
    const std::byte* at = rows[0] + 2 * first;
    const F pairs = rest >= 2 * Isa::kLanes ? _mm512_loadu_ps(at) : Isa::dwords(at, rest / 2);
    out[0] = even(pairs);
    out[1] = odd(pairs);
  }
  static void order(F (&x)[2]) {
    const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const F first = _mm512_permutex2var_ps(x[0], low, x[1]);
    x[1] = _mm512_permutex2var_ps(x[0], _mm512_add_epi32(low, _mm512_set1_epi32(8)), x[1]);
    x[0] = first;
  }

  static void split(F low, F high, int count, std::uint32_t* even, std::uint32_t* odd) {
    const __m512i order = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const F first = _mm512_permutex2var_ps(low, order, high);
    const F second = _mm512_permutex2var_ps(low, _mm512_add_epi32(order, _mm512_set1_epi32(1)), high);
    Isa::store(reinterpret_cast<float*>(even), first, count);
    Isa::store(reinterpret_cast<float*>(odd), second, count);
  }
  template <Type kType>
  static void split_row(const std::byte* row, int count, std::uint32_t* out) {
    constexpr int kLanes = Isa::kLanes;
    const auto load = [&](int i) { return Isa::widen<kType>(row + i * size_of(kType), smaller(kLanes, count - i)); };
    for (int i = 0; i < count; i += 2 * kLanes) {
      const F high = i + kLanes < count ? load(i + kLanes) : Isa::zero();
      split(load(i), high, smaller(kLanes, (count - i) / 2), out + i / 2, out + (count + i) / 2);
    }
  }
  static float pack_query(const Attention& a, const std::byte* row, std::uint32_t* out) {
    with_type(a.query_type, [&]<Type kType>() { split_row<kType>(row, a.head_dim, out); });
    return 1;
  }
};

}  // namespace

constinit const Kernels avx512_kernels{
    .name = "avx512",
    .needs = "AVX-512 (F, BW, DQ, VL)",
    .base = nullptr,
    .lanes = Avx512::kLanes,
    .supported = has_avx512,
    .worthwhile = nullptr,
    .linear_layers = true,
    .attend = {attend_items<Floats<Avx512, Type::kFloat32>>, attend_items<Widened>,
               attend_items<Floats<Avx512, Type::kFloat16>>, attend_items<Floats<Avx512, Type::kInt8>>},
    .merge = merge_rows<Avx512>,
    .norm = layer_row<Avx512, Norm>,
    .rotation = layer_row<Avx512, Rotation>,
    .gate = layer_row<Avx512, Gate>,
    .linear_row = widen_row<Widened>,
    .linear = linear_item<Widened>,
    .products = {product_loop<Floats<Avx512, Type::kFloat32>>, product_loop<Widened>,
                 product_loop<Floats<Avx512, Type::kFloat16>>, product_loop<Floats<Avx512, Type::kInt8>>},
    .read = read_loop<Avx512>};

}  // namespace vattn::kernels
