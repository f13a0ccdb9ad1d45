// What a decoder layer computes before and after its attention, in one call each. All in bfloat16; a result of a step
// in between is rounded to it, as where each step is a call of its own.
#pragma once

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
  Weight gate_up, down;
};

struct ResidualCall {
  std::int64_t tokens;
  const std::byte *input, *attended;
  std::byte* result;
};

void compute(const Projection&, const ProjectionCall&, const Kernels&, int threads);
void compute(const Residual&, const ResidualCall&, const Kernels&, int threads);

}  // namespace vattn::kernels
