// What attention takes at the least on this machine: its products, and reading keys and values. Benchmarks hold the
// kernels against the larger of the two.
#pragma once

#include <cstdint>

#include "attention.h"

namespace vattn::kernels {

// At least `count` multiply-adds, by the product that attention over `stored` uses, with operands in registers.
void products(const Kernels&, Type stored, std::int64_t count, int threads);

// Reads memory by plain loads of vectors, each thread a share of its own. What is left behind whole lines is not read.
void read(const Kernels&, const std::byte* data, std::int64_t bytes, int threads);

}  // namespace vattn::kernels
