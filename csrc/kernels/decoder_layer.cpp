#include "decoder_layer.h"

#include <algorithm>

#include "layers.h"
#include "room.h"

namespace vattn::kernels {

namespace {

constexpr std::int64_t kSize = size_of(Type::kBFloat16);
// At most, of tokens that pass an MLP together: what lies between its products stays in the caches, and a product reads
// its weight once for as many.
constexpr std::int64_t kTokens = 256;

std::size_t size(std::int64_t tokens, std::int64_t width) { return aligned(tokens * width * kSize); }

void normalise(const NormWeight& norm, std::int64_t tokens, std::int64_t width, const std::byte* input,
               std::byte* output, const Kernels& kernels, int threads) {
  compute(Norm{Type::kBFloat16, tokens, width, width, input, norm.weight, norm.epsilon, output}, kernels, threads);
}

void multiply(const Weight& weight, std::int64_t tokens, const std::byte* input, const std::byte* other,
              std::byte* output, const Kernels& kernels, int threads) {
  compute(Linear{tokens, input, weight.in * kSize, weight, other, output}, kernels, threads);
}

}  // namespace

void compute(const Projection& p, const ProjectionCall& call, const Kernels& kernels, int threads) {
  static thread_local Room room;
  std::byte* normed = room.reserve(size(call.tokens, p.weight.in));
  normalise(p.norm, call.tokens, p.weight.in, call.input, normed, kernels, threads);
  multiply(p.weight, call.tokens, normed, nullptr, call.heads, kernels, threads);
  compute(Rotation{Type::kBFloat16, call.tokens, p.weight.out, p.num_queries, p.num_keys, p.head_dim, call.heads,
                   call.cos, call.sin, p.query_norm, p.key_norm, p.head_epsilon},
          kernels, threads);
}

void compute(const Residual& r, const ResidualCall& call, const Kernels& kernels, int threads) {
  if (!call.tokens) return;
  const std::int64_t width = r.output.out;
  const std::int64_t parts = (call.tokens + kTokens - 1) / kTokens, most = (call.tokens + parts - 1) / parts;
  static thread_local Room room;
  std::byte* normed = room.reserve(size(most, width) + size(most, r.gate_up.out) + size(most, r.down.in));
  std::byte* gate_up = normed + size(most, width);
  std::byte* gated = gate_up + size(most, r.gate_up.out);
  multiply(r.output, call.tokens, call.attended, call.input, call.result, kernels, threads);
  for (std::int64_t first = 0; first < call.tokens; first += most) {
    const std::int64_t tokens = std::min(most, call.tokens - first);
    std::byte* rows = call.result + first * width * kSize;
    normalise(r.norm, tokens, width, rows, normed, kernels, threads);
    multiply(r.gate_up, tokens, normed, nullptr, gate_up, kernels, threads);
    compute(Gate{Type::kBFloat16, tokens, r.down.in, gate_up, gated}, kernels, threads);
    multiply(r.down, tokens, gated, rows, rows, kernels, threads);
  }
}

}  // namespace vattn::kernels
