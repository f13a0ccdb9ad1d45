// Linear layers over weights of bfloat16, by the product of attention over keys of bfloat16: of pairs, or of floats on
// CPUs that multiply these faster, or have no product of pairs.
#pragma once

#include <cstdint>

#include "attention.h"

namespace vattn::kernels {

struct Weight {
  std::int64_t in, out;         // `in` is even
  bool gated;                   // two weights of `out` rows, gate and up, whose panels take turns
  const std::uint32_t* panels;  // [ceil(out / lanes), in / 2, lanes], or twice as many: neighbours of a weight's row
  const std::byte* bias;        // [out], or of gate and up [2, out]; or null

  int each() const { return gated ? 2 : 1; }  // panels of so many outputs as there are lanes
};

// output = input x weight^T + bias + other, rounded once. All in bfloat16. Where the weight is gated,
// silu(gate) * up + other, of both products with their bias.
struct Linear {
  std::int64_t rows;
  const std::byte* input;
  std::int64_t input_stride;  // bytes, a multiple of four
  Weight weight;
  const std::byte* other;  // [rows, out], contiguous, or null
  std::byte* output;       // [rows, out], contiguous
};

// A block of the output.
struct LinearItem {
  std::int64_t row, num_rows;
  std::int64_t panel, num_panels;
  const std::uint32_t* input;  // as `Kernels::linear_row` writes rows; where it is null, as they are
  std::int64_t input_stride;   // in elements of four bytes
  float* sums;                 // [num_rows, num_panels * lanes]
  const float* ones;           // [num_rows]
};

void compute(const Linear&, const Kernels&, int threads);

}  // namespace vattn::kernels
