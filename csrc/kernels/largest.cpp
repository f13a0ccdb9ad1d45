#include "largest.h"

#include <algorithm>
#include <limits>

namespace vattn::kernels {

namespace {

constexpr std::int64_t kBlockSize = 512;
// Fewer elements are done before another thread has woken up.
constexpr std::int64_t kAlone = 1 << 16;

// Integers that are ordered as floats of as many bits are, but that NaN is the largest, and infinities are those given
// and its opposite.
template <class Integer>
Integer key(Integer bits, Integer infinity) {
  constexpr Integer kMost = std::numeric_limits<Integer>::max();
  const auto magnitude = static_cast<Integer>(bits & kMost), sign = static_cast<Integer>(bits < 0 ? -1 : 0);
  const auto ordered = static_cast<Integer>((magnitude ^ sign) - sign);
  // By masks: GCC makes no vectors of a choice here.
  const auto nan = static_cast<Integer>(-(magnitude > infinity));
  return static_cast<Integer>((ordered & ~nan) | (kMost & nan));
}

// The index of a row's largest element; returns whether it is finite.
template <class Integer>
bool find(const std::byte* data, std::int64_t width, Integer infinity, std::int64_t* index) {
  const auto* row = reinterpret_cast<const Integer*>(data);
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
  *index = first;
  return best > -infinity && best < infinity;
}

bool find(const Largest& l, std::int64_t row) {
  const std::byte* data = l.input + row * l.stride * size_of(l.type);
  if (l.type == Type::kFloat32) return find<std::int32_t>(data, l.width, 0x7f800000, l.indices + row);
  return find<std::int16_t>(data, l.width, l.type == Type::kBFloat16 ? 0x7f80 : 0x7c00, l.indices + row);
}

}  // namespace

bool compute(const Largest& l, int threads) {
  bool finite = true;
#pragma omp parallel for num_threads(threads) if (threads > 1 && l.rows > 1 && l.rows * l.width > kAlone) \
    reduction(&& : finite)
  for (std::int64_t row = 0; row < l.rows; ++row) finite = find(l, row) && finite;
  return finite;
}

}  // namespace vattn::kernels
