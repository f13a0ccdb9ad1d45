#include "store.h"

#include <algorithm>
#include <cstring>

namespace vattn::kernels {

namespace {

// Fewer bytes are copied before other threads have woken up.
constexpr std::int64_t kAlone = 1 << 17;
// Rows lie far apart, so each is a miss of the caches and of the TLB. So many are on their way at a time.
constexpr std::int64_t kAhead = 16;
constexpr std::int64_t kLine = 64;

}  // namespace

void store(const Store& given, int threads) {
  Store s = given;
  if (s.source_head == s.bytes && s.target_head == s.bytes) {  // heads that follow each other are one row
    s.bytes *= s.heads;
    s.heads = 1;
  }
  const auto target = [&](std::int64_t token) {
    const std::int64_t position = s.positions ? s.positions[token] : 0;
    return s.target + s.slots[token] * s.target_slot + position * s.target_token;
  };
  const auto is_stored = [&](std::int64_t token) { return s.slots[token] >= 0; };
  const auto fetch = [&](std::int64_t token) {
    if (!is_stored(token)) return;
    std::byte* row = target(token);
    for (std::int64_t h = 0; h < s.heads; ++h)
      for (std::int64_t at = 0; at < s.bytes; at += kLine) __builtin_prefetch(row + h * s.target_head + at, 1);
  };
  const std::int64_t parts = s.tokens * s.heads * s.bytes > kAlone ? threads : 1;
#pragma omp parallel for num_threads(parts) if (parts > 1) schedule(static)
  for (std::int64_t part = 0; part < parts; ++part) {
    const std::int64_t begin = s.tokens * part / parts, end = s.tokens * (part + 1) / parts;
    for (std::int64_t token = begin; token < std::min(begin + kAhead, end); ++token) fetch(token);
    for (std::int64_t token = begin; token < end; ++token) {
      if (token + kAhead < end) fetch(token + kAhead);
      if (!is_stored(token)) continue;
      std::byte* row = target(token);
      const std::byte* from = s.source + token * s.source_token;
      for (std::int64_t h = 0; h < s.heads; ++h)
        std::memcpy(row + h * s.target_head, from + h * s.source_head, static_cast<std::size_t>(s.bytes));
    }
  }
}

}  // namespace vattn::kernels
