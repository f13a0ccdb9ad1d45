// A layer of a cache whose memory does not move: what a call adds are new rows, where they go, and the requests.
#pragma once

#include "attention.h"
#include "store.h"

namespace vattn::kernels {

struct CacheLayer {
  Attention attention;  // but for its requests, queries, output and threads
  Store key, value;     // but for their sources and places
};

// Rows of tokens whose heads are contiguous; strides in bytes.
struct TokenRows {
  const std::byte* data;
  std::int64_t token_stride, head_stride;
};

// Where the keys and values of each token are stored, as in store.h.
struct Places {
  const std::int64_t *slots, *positions;
};

struct CacheCall {
  std::int64_t tokens;
  TokenRows query, key, value;
  Places places;
  int count;  // of requests, which are as in `Requests`
  const std::int32_t *slots, *lengths, *starts;
  std::byte* output;  // as in `Attention`
};

void store(const CacheLayer&, const CacheCall&, int threads);
void attend(const CacheLayer&, const CacheCall&, const Kernels&, int threads);

}  // namespace vattn::kernels
