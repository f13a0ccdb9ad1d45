#include "largest.h"

#include <algorithm>
#include <limits>

namespace vattn::kernels {

namespace {

constexpr std::int64_t kBlockSize = 512;
// Fewer elements are done before another thread has woken up.
constexpr std::int64_t kAlone = 1 << 16;

// Integers that are ordered as floats of as many bits are, but that NaN is the largest.
template <class Integer>
Integer key(Integer bits, Integer infinity) {
  constexpr Integer kMost = std::numeric_limits<Integer>::max();
  const Integer magnitude = bits & kMost, sign = bits < 0 ? -1 : 0;
  const Integer ordered = static_cast<Integer>((magnitude ^ sign) - sign);
  return magnitude > infinity ? kMost : ordered;
}

template <class Integer>
std::int64_t largest(const Integer* row, std::int64_t width, Integer infinity) {
  Integer best = std::numeric_limits<Integer>::min();
  std::int64_t first = 0;
  for (std::int64_t begin = 0; begin < width; begin += kBlockSize) {
    const std::int64_t end = std::min(width, begin + kBlockSize);
    Integer most = std::numeric_limits<Integer>::min();
    for (std::int64_t i = begin; i < end; ++i) most = std::max(most, key(row[i], infinity));
    if (most > best) {
      best = most;
      first = begin;
    }
  }
  while (key(row[first], infinity) != best) ++first;
  return first;
}

std::int64_t largest(const Largest& l, std::int64_t row) {
  const std::byte* data = l.input + row * l.stride * size_of(l.type);
  if (l.type == Type::kFloat32)
    return largest<std::int32_t>(reinterpret_cast<const std::int32_t*>(data), l.width, 0x7f800000);
  const auto infinity = static_cast<std::int16_t>(l.type == Type::kBFloat16 ? 0x7f80 : 0x7c00);
  return largest<std::int16_t>(reinterpret_cast<const std::int16_t*>(data), l.width, infinity);
}

}  // namespace

void compute(const Largest& l, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && l.rows > 1 && l.rows * l.width > kAlone)
  for (std::int64_t row = 0; row < l.rows; ++row) l.indices[row] = largest(l, row);
}

}  // namespace vattn::kernels
