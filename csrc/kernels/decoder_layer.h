// What a decoder layer computes before and after its attention, in one call each; or whole layers, one after the other.
// All in bfloat16; a result of a step in between is rounded to it, as where each step is a call of its own, but those
// of gate and up.
#pragma once

#include <span>

#include "cache_layer.h"
#include "linear.h"

namespace vattn::kernels {

struct NormWeight {
  const std::byte* weight;
  float epsilon;
};

// Of tokens `[tokens, in]`: weight x norm(token), whose queries and keys are rotated.
struct Projection {
  NormWeight norm;
  Weight weight;
  int num_queries, num_keys, head_dim;
  const std::byte *query_norm, *key_norm;  // of each head, before it is rotated; or null
  float head_epsilon;
};

struct ProjectionCall {
  std::int64_t tokens;
  const std::byte* input;
  const std::byte *cos, *sin;  // as in layers.h
  std::byte* heads;            // [tokens, heads, head_dim]
};

// Of tokens and what attention brings them, each `[tokens, in]`: h = token + output x attended, and then
// h + down x (silu(gate x norm(h)) * up x norm(h)).
struct Residual {
  Weight output;
  NormWeight norm;
  Weight gate_up, down;  // the former is gated
};

struct ResidualCall {
  std::int64_t tokens;
  const std::byte *input, *attended;
  std::byte* result;
};

void compute(const Projection&, const ProjectionCall&, const Kernels&, int threads);
void compute(const Residual&, const ResidualCall&, const Kernels&, int threads);

struct DecoderLayer {
  const Projection* projection;
  const CacheLayer* cache;  // of as many heads of one size
  const Residual* residual;
};

struct DecoderCall {
  Places places;  // in every layer
  std::int64_t tokens;
  std::byte* rows;  // [tokens, in]: before the first layer, and then after the last one
  const std::byte *cos, *sin;
  int count;  // of requests, as in `CacheCall`
  const std::int32_t *slots, *lengths, *starts;
};

// Seconds in each part of all layers.
struct DecoderTimes {
  double projection = 0, store = 0, attention = 0, residual = 0;
};

DecoderTimes compute(std::span<const DecoderLayer>, const DecoderCall&, const Kernels&, int threads);

}  // namespace vattn::kernels
