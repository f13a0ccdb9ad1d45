// AVX-512 with products of floats, and of 8-bit quads.
#include "avx512_floats.h"
#include "quads.h"

namespace vattn::kernels {
namespace {

bool supported() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

}  // namespace

extern const Kernels avx512_vnni_kernels;
const Kernels avx512_vnni_kernels =
    kernels_of_floats<Quads>("avx512_vnni", "AVX-512 (F, BW, DQ, VL) with VNNI", supported);

}  // namespace vattn::kernels
