#include "avx512.h"

#include "layer_rows.h"
#include "tile.h"

namespace vattn::kernels {
namespace {

bool supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

}  // namespace

extern const Kernels avx512_kernels;
const Kernels avx512_kernels{"avx512",
                             "AVX-512 (F, BW, DQ, VL)",
                             Avx512::kLanes,
                             supported,
                             attend_any<Avx512, Floats<Avx512, Type::kBFloat16>, Floats<Avx512, Type::kInt8>>,
                             merge_rows<Avx512>,
                             layer_row<Avx512, Norm>,
                             layer_row<Avx512, Rotation>,
                             layer_row<Avx512, Gate>};

}  // namespace vattn::kernels
