// AVX-512 with products of pairs of bfloat16.
#include "avx512.h"
#include "linear_tile.h"
#include "roofline_loops.h"
#include "row_lanes.h"
#include "timing.h"

namespace vattn::kernels {
namespace {

// Neighbours that are multiplied as pairs.
struct Pairs : Neighbours<Avx512>, TokenPairs {
  using F = Avx512::F;
  static constexpr int kVectorBytes = 32;

  using Lanes = RowLanes<Pairs>;
  static constexpr int kLaneRows = 16, kQueryParts = 1, kHead = 0;
  struct LaneSum {
    F sum;
    void start(const std::uint32_t*) { sum = Isa::zero(); }
    void step(const std::uint32_t* queries, int, F keys) {
      sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_ps(queries), (__m512bh)keys);
    }
    F finish() const { return sum; }
    static F add(F x, F y) { return Isa::add(x, y); }
  };

  struct Product : PlainProduct<Isa> {
    static F step(F sum, const std::uint32_t* a, int, F b) {
      const __m512bh pairs = (__m512bh)_mm512_set1_epi32(static_cast<int>(*a));
      return _mm512_dpbf16_ps(sum, pairs, (__m512bh)b);
    }
  };
  using ForKeys = Product;
  using ForValues = Product;

  static void values(const std::byte* const* rows, int present, int first, int rest, F (&out)[2]) {
    const __m512i even = _mm512_castps_si512(Isa::dwords(rows[0] + 2 * first, rest / 2));
    const __m512i odd = _mm512_castps_si512(Isa::dwords(rows[1] + 2 * first, present == 2 ? rest / 2 : 0));
    unpack(even, odd, out);
  }

  // Below the least normal number is 0, as products of pairs have it.
  static void round(std::byte* at, F x, int count) { Isa::store_halves(at, (__m256i)_mm512_cvtneps_pbh(x), count); }

  static int query_stride(int head_dim) { return head_dim / 2; }
  static int query_gap(int) { return 0; }
  static float pack_query(const Attention& a, const std::byte* row, std::uint32_t* out) {
    std::memcpy(out, row, static_cast<std::size_t>(a.head_dim) * 2);
    return 1;
  }
  template <class Weight>
  static float pack_weights(int vectors, const Weight& weight, std::uint32_t* out) {
    for (int i = 0; i < vectors; ++i)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out) + i, (__m256i)_mm512_cvtneps_pbh(weight(i)));
    return 1;
  }
};

bool supported() {
  return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}

// A product of pairs does the work of two products of floats. Where it takes as long as four of them, as on Xeons whose
// AMX does this work, floats are faster although they have to be widened. The quotient was 2 on such a one; a CPU that
// was built for pairs has 1/2 or 1.
bool worthwhile() {
  constexpr std::int64_t kCount = 1 << 17;
  const double floats = seconds([] { product_loop<Floats<Avx512, Type::kFloat32>>(kCount); });
  return seconds([] { product_loop<Pairs>(kCount); }) < 1.5 * floats;
}

}  // namespace

constinit const Kernels avx512_bf16_kernels{.name = "avx512_bf16",
                                            .needs = "AVX-512 (F, BW, DQ, VL) with BF16 and VNNI",
                                            .base = &avx512_vnni_kernels,
                                            .lanes = Avx512::kLanes,
                                            .supported = supported,
                                            .worthwhile = worthwhile,
                                            .panels_are_faster = nullptr,
                                            .linear_layers = true,
                                            .attend = {nullptr, attend_items<Pairs>, nullptr, nullptr},
                                            .merge = nullptr,
                                            .norm = nullptr,
                                            .rotation = nullptr,
                                            .gate = nullptr,
                                            .linear_row = nullptr,
                                            .linear = linear_item<Pairs>,
                                            .products = {nullptr, product_loop<Pairs>, nullptr, nullptr},
                                            .read = nullptr};

}  // namespace vattn::kernels
