// The loops of roofline.h, written once for all instruction sets; as in tile.h, each has its own copy.
#pragma once

#include "tile.h"

namespace vattn::kernels {
namespace {

// Tells the compiler that what was computed is needed.
template <class Isa>
void keep(typename Isa::F x) {
  [[maybe_unused]] volatile float kept = Isa::sum(x);
}

// Independent sums in twelve registers: they hide the latency of a product, and any instruction set has as many.
template <class Kind>
void product_loop(std::int64_t count) {
  using Isa = typename Kind::Isa;
  using Product = typename Kind::ForKeys;
  constexpr int kSums = 12 * sizeof(typename Isa::F) / sizeof(typename Product::Sum);
  constexpr std::int64_t kEach = kSums * Isa::kLanes * Kind::kElements;
  std::uint32_t operands[64] = {};
  asm volatile("" : : "r"(operands) : "memory");  // they could be anything, so no two sums are known to be the same
  const typename Isa::F keys = Isa::load(reinterpret_cast<const float*>(operands));
  typename Product::Sum sums[kSums];
#pragma GCC unroll 12
  for (int i = 0; i < kSums; ++i) sums[i] = Product::step(Product::start(operands + 4 * i), operands + 4 * i, 1, keys);
  for (std::int64_t done = 0; done < count; done += kEach)
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) sums[i] = Product::step(sums[i], operands, 1, keys);
#pragma GCC unroll 12
  for (int i = 0; i < kSums; ++i) keep<Isa>(Product::finish(sums[i], 1));
}

template <class Isa>
void read_loop(const std::byte* data, std::int64_t bytes) {
  constexpr int kSums = 8, kBytes = 4 * Isa::kLanes;
  typename Isa::F sums[kSums];
#pragma GCC unroll 8
  for (int i = 0; i < kSums; ++i) sums[i] = Isa::zero();
  const auto add = [&](int i, const std::byte* at) {
    sums[i] = Isa::add(sums[i], Isa::load(reinterpret_cast<const float*>(at)));
  };
  for (; bytes >= kSums * kBytes; bytes -= kSums * kBytes, data += kSums * kBytes)
#pragma GCC unroll 8
    for (int i = 0; i < kSums; ++i) add(i, data + i * kBytes);
  for (; bytes >= kBytes; bytes -= kBytes, data += kBytes) add(0, data);
#pragma GCC unroll 8
  for (int i = 0; i < kSums; ++i) keep<Isa>(sums[i]);
}

}  // namespace
}  // namespace vattn::kernels
