// Rows of block numbers, compared with what windows show.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vattn {

// Rows of equal length; `counts` are the numbers that are in use at the start of each.
struct BlockRows {
  const std::int32_t* blocks;
  std::size_t stride;
  const std::int32_t* counts;
};

// How many numbers at its start row `row` of `table` has in common with row `window` of `shown`.
std::size_t common_blocks(const BlockRows& table, std::size_t row, const BlockRows& shown, std::size_t window);

}  // namespace vattn
