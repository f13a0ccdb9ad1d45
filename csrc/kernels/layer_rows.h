// Rows of layers.h, written once for all instruction sets; as in tile.h, each has its own copy.
#pragma once

#include <cstring>

#include "layers.h"
#include "tile.h"

namespace vattn::kernels {
namespace {

// silu(x) * y
template <class Isa>
typename Isa::F silu_times(typename Isa::F x, typename Isa::F y) {
  const auto e = Isa::exp2(Isa::mul(x, Isa::set(-kLog2E)));
  return Isa::mul(Isa::div(x, Isa::add(e, Isa::set(1))), y);
}

template <class Isa, Type kType>
struct LayerRows {
  using F = typename Isa::F;
  static constexpr int kLanes = Isa::kLanes;
  static constexpr std::int64_t kSize = size_of(kType);

  static F load(const std::byte* row, std::int64_t i, std::int64_t rest) {
    return Isa::template widen<kType>(row + i * kSize, rest < kLanes ? static_cast<int>(rest) : kLanes);
  }
  static void store(std::byte* row, std::int64_t i, F x, std::int64_t rest) {
    Isa::template narrow<kType>(row + i * kSize, x, rest < kLanes ? static_cast<int>(rest) : kLanes);
  }

  static float norm_factor(const std::byte* row, std::int64_t width, float epsilon) {
    F sum = Isa::zero();
    for (std::int64_t i = 0; i < width; i += kLanes) {
      const F x = load(row, i, width - i);
      sum = Isa::fma(x, x, sum);
    }
    return 1 / __builtin_sqrtf(Isa::sum(sum) / static_cast<float>(width) + epsilon);
  }

  static void norm(const Norm& n, std::int64_t row) {
    const std::byte* input = n.input + row * n.stride * kSize;
    std::byte* output = n.output + row * n.width * kSize;
    const F factor = Isa::set(norm_factor(input, n.width, n.epsilon));
    for (std::int64_t i = 0; i < n.width; i += kLanes) {
      const F x = Isa::mul(load(input, i, n.width - i), factor);
      store(output, i, Isa::mul(x, load(n.weight, i, n.width - i)), n.width - i);
    }
  }

  static void rotation(const Rotation& r, std::int64_t token) {
    const int half = r.head_dim / 2;
    const std::byte *cos = r.cos + token * r.head_dim * kSize, *sin = r.sin + token * r.head_dim * kSize;
    for (int head = 0; head < r.num_queries + r.num_keys; ++head) {
      std::byte* row = r.heads + (token * r.stride + head * r.head_dim) * kSize;
      const std::byte* weight = head < r.num_queries ? r.query_weight : r.key_weight;
      const F factor = Isa::set(weight ? norm_factor(row, r.head_dim, r.epsilon) : 1);
      for (int i = 0; i < half; i += kLanes) {
        const int rest = half - i;
        F first = load(row, i, rest), second = load(row, half + i, rest);
        if (weight) {
          first = Isa::mul(Isa::mul(first, factor), load(weight, i, rest));
          second = Isa::mul(Isa::mul(second, factor), load(weight, half + i, rest));
        }
        const F turned = Isa::mul(second, load(sin, i, rest));
        store(row, i, Isa::sub(Isa::mul(first, load(cos, i, rest)), turned), rest);
        store(row, half + i, Isa::fma(second, load(cos, half + i, rest), Isa::mul(first, load(sin, half + i, rest))),
              rest);
      }
    }
  }

  static void gate(const Gate& g, std::int64_t row) {
    const std::byte* input = g.input + row * 2 * g.width * kSize;
    std::byte* output = g.output + row * g.width * kSize;
    for (std::int64_t i = 0; i < g.width; i += kLanes) {
      const F x = load(input, i, g.width - i), y = load(input, g.width + i, g.width - i);
      store(output, i, silu_times<Isa>(x, y), g.width - i);
    }
  }
};

template <class Isa, class Work>
void layer_row(const Work& work, std::int64_t row) {
  with_type(work.type, [&]<Type kType>() {
    using Rows = LayerRows<Isa, kType>;
    if constexpr (__is_same(Work, Norm))
      Rows::norm(work, row);
    else if constexpr (__is_same(Work, Rotation))
      Rows::rotation(work, row);
    else
      Rows::gate(work, row);
  });
}

}  // namespace
}  // namespace vattn::kernels
