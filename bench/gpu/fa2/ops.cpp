// torch.ops.vattn_fa2.fwd_kvcache: flash-attn 2's `mha_fwd_kvcache`, for the head sizes and the type that are compiled
// in.
//
// flash-attn's own host code (flash_api.cpp) is included unmodified. Its dispatcher is a macro, narrowed here, and its
// Python module is left out: an operator of torch's registry needs no symbol of Python, so one library serves every
// Python version.

#include <cutlass/numeric_types.h>
#include <torch/library.h>

#include "static_switch.h"

#undef FP16_SWITCH
#define FP16_SWITCH(HALF, ...)                                                     \
  [&] {                                                                            \
    TORCH_CHECK(!(HALF), "vattn_fa2 is built for bfloat16 only, not for float16"); \
    using elem_type = cutlass::bfloat16_t;                                         \
    return __VA_ARGS__();                                                          \
  }()

#undef HEADDIM_SWITCH
#define HEADDIM_SWITCH(HEADDIM, ...)                                                               \
  [&] {                                                                                            \
    if ((HEADDIM) == 64) {                                                                         \
      constexpr static int kHeadDim = 64;                                                          \
      return __VA_ARGS__();                                                                        \
    }                                                                                              \
    TORCH_CHECK((HEADDIM) == 128, "vattn_fa2 is built for heads of 64 and 128, not of ", HEADDIM); \
    constexpr static int kHeadDim = 128;                                                           \
    return __VA_ARGS__();                                                                          \
  }()

// The module's body is left as a template that nothing instantiates.
#define PYBIND11_MODULE(name, variable) \
  template <class Module>               \
  void left_out(Module& variable)

#include "flash_api.cpp"

namespace {

using at::Tensor;

Tensor fwd_kvcache(Tensor q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& cache_seqlens,
                   const std::optional<Tensor>& cache_batch_idx, std::optional<Tensor> block_table,
                   double softmax_scale, bool causal, int64_t window_left, int64_t window_right, double softcap,
                   int64_t num_splits) {
  std::optional<const Tensor> none, lengths(cache_seqlens), slots;
  if (cache_batch_idx) slots.emplace(*cache_batch_idx);
  std::optional<Tensor> no_slopes, no_out;
  return FLASH_NAMESPACE::mha_fwd_kvcache(
      q, k_cache, v_cache, /*k=*/none, /*v=*/none, lengths, /*rotary_cos=*/none, /*rotary_sin=*/none, slots,
      /*leftpad=*/none, block_table, no_slopes, no_out, static_cast<float>(softmax_scale), causal,
      static_cast<int>(window_left), static_cast<int>(window_right), static_cast<float>(softcap),
      /*rotary_interleaved=*/true, static_cast<int>(num_splits))[0];
}

}  // namespace

TORCH_LIBRARY(vattn_fa2, library) {
  library.def(
      "fwd_kvcache(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cache_seqlens, Tensor? cache_batch_idx, "
      "Tensor? block_table, float softmax_scale, bool causal, int window_left, int window_right, float softcap, "
      "int num_splits) -> Tensor");
}

TORCH_LIBRARY_IMPL(vattn_fa2, CUDA, library) { library.impl("fwd_kvcache", &fwd_kvcache); }
