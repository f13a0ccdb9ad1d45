#include "decoder_layer.h"

#include <algorithm>
#include <chrono>

#include "layers.h"
#include "room.h"

namespace vattn::kernels {

namespace {

constexpr std::int64_t kSize = size_of(Type::kBFloat16);
// At most, of tokens that are computed together: what lies between two products stays in the caches, and a product
// reads its weight once for as many.
constexpr std::int64_t kTokens = 256;

// Tokens are computed in parts of nearly equal size: that of the largest,
std::int64_t most_tokens(std::int64_t tokens) {
  const std::int64_t parts = (tokens + kTokens - 1) / kTokens;
  return parts ? (tokens + parts - 1) / parts : 0;
}

// and a call of a function with the first token and the number of each.
template <class Function>
void for_parts(std::int64_t tokens, const Function& function) {
  const std::int64_t most = most_tokens(tokens);
  for (std::int64_t first = 0; first < tokens; first += most) function(first, std::min(most, tokens - first));
}

// Token `index` of contiguous ones.
template <class Bytes>
Bytes* token(Bytes* tokens, std::int64_t index, std::int64_t width) {
  return tokens + index * width * kSize;
}

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
  std::byte* normed = room.reserve(size(most_tokens(call.tokens), p.weight.in));
  for_parts(call.tokens, [&](std::int64_t first, std::int64_t tokens) {
    std::byte* heads = token(call.heads, first, p.weight.out);
    normalise(p.norm, tokens, p.weight.in, token(call.input, first, p.weight.in), normed, kernels, threads);
    multiply(p.weight, tokens, normed, nullptr, heads, kernels, threads);
    compute(Rotation{Type::kBFloat16, tokens, p.weight.out, p.num_queries, p.num_keys, p.head_dim, heads,
                     token(call.cos, first, p.head_dim), token(call.sin, first, p.head_dim), p.query_norm, p.key_norm,
                     p.head_epsilon},
            kernels, threads);
  });
}

void compute(const Residual& r, const ResidualCall& call, const Kernels& kernels, int threads) {
  const std::int64_t width = r.output.out, most = most_tokens(call.tokens);
  static thread_local Room room;
  std::byte* normed = room.reserve(size(most, width) + size(most, r.down.in));
  std::byte* gated = normed + size(most, width);
  for_parts(call.tokens, [&](std::int64_t first, std::int64_t tokens) {
    std::byte* rows = token(call.result, first, width);
    multiply(r.output, tokens, token(call.attended, first, r.output.in), token(call.input, first, width), rows, kernels,
             threads);
    normalise(r.norm, tokens, width, rows, normed, kernels, threads);
    multiply(r.gate_up, tokens, normed, nullptr, gated, kernels, threads);
    multiply(r.down, tokens, gated, rows, rows, kernels, threads);
  });
}

DecoderTimes compute(std::span<const DecoderLayer> layers, const DecoderCall& call, const Kernels& kernels,
                     int threads) {
  std::int64_t most = 0, attended_width = 0;
  for (const DecoderLayer& layer : layers) {
    most = std::max(most, layer.projection->weight.out);
    attended_width = std::max(attended_width, layer.residual->output.in);
  }
  static thread_local Room room;
  std::byte* heads = room.reserve(size(call.tokens, most) + size(call.tokens, attended_width));
  std::byte* attended = heads + size(call.tokens, most);

  DecoderTimes times;
  auto since = std::chrono::steady_clock::now();
  const auto count = [&](double& part) {
    const auto now = std::chrono::steady_clock::now();
    part += std::chrono::duration<double>(now - since).count();
    since = now;
  };
  for (const auto& [projection, cache, residual] : layers) {
    compute(*projection, {call.tokens, call.rows, call.cos, call.sin, heads}, kernels, threads);
    count(times.projection);
    const std::int64_t head = projection->head_dim * kSize, stride = projection->weight.out * kSize;
    const std::byte* keys = heads + projection->num_queries * head;
    const std::byte* values = keys + projection->num_keys * head;
    const CacheCall rows{call.tokens,          {heads, stride, head},
                         {keys, stride, head}, {values, stride, head},
                         call.places,          call.count,
                         call.slots,           call.lengths,
                         call.starts,          attended};
    store(*cache, rows, threads);
    count(times.store);
    attend(*cache, rows, kernels, threads);
    count(times.attention);
    compute(*residual, {call.tokens, call.rows, attended, call.rows}, kernels, threads);
    count(times.residual);
  }
  return times;
}

}  // namespace vattn::kernels
