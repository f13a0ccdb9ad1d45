// Storing the keys and values of new tokens where a cache has its rows.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vattn::kernels {

// Strides in bytes.
struct Store {
  std::int64_t tokens, heads, bytes;  // of a row of a head
  const std::byte* source;
  std::int64_t source_token, source_head;
  std::byte* target;
  std::int64_t target_slot, target_token, target_head;
  const std::int64_t* slots;      // of each token
  const std::int64_t* positions;  // likewise; null for 0
};

void store(const Store&, int threads);

}  // namespace vattn::kernels
