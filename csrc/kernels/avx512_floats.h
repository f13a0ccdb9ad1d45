// Kernels that multiply floats, whatever multiplies codes.
#pragma once

#include "avx512.h"
#include "layer_rows.h"
#include "linear_tile.h"

namespace vattn::kernels {
namespace {

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

template <class Codes>
constexpr Kernels kernels_of_floats(const char* name, const char* needs, bool (*supported)()) {
  return {name,
          needs,
          Avx512::kLanes,
          supported,
          nullptr,
          attend_any<Avx512, Widened, Codes>,
          merge_rows<Avx512>,
          layer_row<Avx512, Norm>,
          layer_row<Avx512, Rotation>,
          layer_row<Avx512, Gate>,
          widen_row<Widened>,
          linear_item<Widened>};
}

}  // namespace
}  // namespace vattn::kernels
