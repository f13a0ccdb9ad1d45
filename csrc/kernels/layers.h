// What lies between the matrix products of a decoder layer: norm, rotation, activation. Rows are computed in float32
// and rounded once.
#pragma once

#include <cstdint>

#include "attention.h"

namespace vattn::kernels {

// Root mean square norm of each row: x / sqrt(mean(x^2) + epsilon) * weight.
struct Norm {
  Type type;
  std::int64_t rows, width, stride;  // of the input, in elements
  const std::byte* input;
  const std::byte* weight;
  float epsilon;
  std::byte* output;  // [rows, width], contiguous
};

// Heads of queries and keys, in place: a norm of each where there are weights, then the halves are rotated against each
// other, x * cos + (-second half, first half) * sin.
struct Rotation {
  Type type;
  std::int64_t tokens, stride;  // of a token, in elements; its heads follow each other, queries first
  int num_queries, num_keys, head_dim;
  std::byte* heads;
  const std::byte *cos, *sin;  // [tokens, head_dim], contiguous
  const std::byte *query_weight, *key_weight;
  float epsilon;
};

// silu(first half) * second half of each row.
struct Gate {
  Type type;
  std::int64_t rows, width;  // of the output; the input has twice as many columns
  const std::byte* input;
  std::byte* output;
};

void compute(const Norm&, const Kernels&, int threads);
void compute(const Rotation&, const Kernels&, int threads);
void compute(const Gate&, const Kernels&, int threads);

}  // namespace vattn::kernels
