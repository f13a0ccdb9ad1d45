// The largest element of each row, for greedy sampling.
#pragma once

#include "attention.h"

namespace vattn::kernels {

// Of floats of a type, `[rows, width]`; strides are elements. The index is that of the first of equal ones, where zeros
// are equal whatever their sign, and NaN is larger than everything.
struct Largest {
  Type type;
  std::int64_t rows, width, stride;
  const std::byte* input;
  std::int64_t* indices;
};

// Whether all of them are finite.
bool compute(const Largest&, int threads);

}  // namespace vattn::kernels
