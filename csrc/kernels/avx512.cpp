// AVX-512 with products of floats.
#include "avx512.h"

#include "layer_rows.h"
#include "linear_tile.h"
#include "roofline_loops.h"
#include "row_lanes.h"
#include "widened.h"

namespace vattn::kernels {

constinit const Kernels avx512_kernels{
    .name = "avx512",
    .needs = "AVX-512 (F, BW, DQ, VL)",
    .base = nullptr,
    .lanes = Avx512::kLanes,
    .supported = has_avx512,
    .worthwhile = nullptr,
    .panels_are_faster = nullptr,
    .linear_layers = true,
    .attend = {attend_items<Floats<Avx512, Type::kFloat32>>, attend_items<Widened<Avx512>>,
               attend_items<Floats<Avx512, Type::kFloat16>>, attend_items<Floats<Avx512, Type::kInt8>>},
    .merge = merge_rows<Avx512>,
    .norm = layer_row<Avx512, Norm>,
    .rotation = layer_row<Avx512, Rotation>,
    .gate = layer_row<Avx512, Gate>,
    .linear_row = widen_row<Widened<Avx512>>,
    .linear = linear_item<Widened<Avx512>>,
    .products = {product_loop<Floats<Avx512, Type::kFloat32>>, product_loop<Widened<Avx512>>,
                 product_loop<Floats<Avx512, Type::kFloat16>>, product_loop<Floats<Avx512, Type::kInt8>>},
    .read = read_loop<Avx512>};

}  // namespace vattn::kernels
