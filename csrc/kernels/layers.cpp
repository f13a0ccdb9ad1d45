#include "layers.h"

#include <omp.h>

namespace vattn::kernels {

namespace {

// Fewer elements are done before other threads have woken up.
constexpr std::int64_t kAlone = 1 << 15;

template <class Work>
void each_row(const Work& work, std::int64_t rows, std::int64_t elements, void (*row)(const Work&, std::int64_t),
              int threads) {
#pragma omp parallel for num_threads(threads) if (elements > kAlone) schedule(static)
  for (std::int64_t i = 0; i < rows; ++i) row(work, i);
}

}  // namespace

void compute(const Norm& norm, const Kernels& kernels, int threads) {
  each_row(norm, norm.rows, norm.rows * norm.width, kernels.norm, threads);
}

void compute(const Rotation& rotation, const Kernels& kernels, int threads) {
  const std::int64_t heads = rotation.num_queries + rotation.num_keys;
  each_row(rotation, rotation.tokens, rotation.tokens * heads * rotation.head_dim, kernels.rotation, threads);
}

void compute(const Gate& gate, const Kernels& kernels, int threads) {
  each_row(gate, gate.rows, gate.rows * gate.width, kernels.gate, threads);
}

}  // namespace vattn::kernels
