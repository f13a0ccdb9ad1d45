// AVX-512 with products of floats.
#include "avx512_floats.h"

namespace vattn::kernels {

extern const Kernels avx512_kernels;
const Kernels avx512_kernels =
    kernels_of_floats<Floats<Avx512, Type::kInt8>>("avx512", "AVX-512 (F, BW, DQ, VL)", has_avx512);

}  // namespace vattn::kernels
