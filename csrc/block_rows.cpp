#include "block_rows.h"

#include <algorithm>
#include <cstring>

namespace vattn {

std::size_t common_blocks(const BlockRows& table, std::size_t row, const BlockRows& shown, std::size_t window) {
  const std::int32_t* a = table.blocks + row * table.stride;
  const std::int32_t* b = shown.blocks + window * shown.stride;
  const auto count = static_cast<std::size_t>(std::min(table.counts[row], shown.counts[window]));
  // Nearly all rows are equal, and memcmp is the fastest way to say so.
  if (std::memcmp(a, b, count * sizeof *a) == 0) return count;
  return static_cast<std::size_t>(std::mismatch(a, a + count, b).first - a);
}

}  // namespace vattn
