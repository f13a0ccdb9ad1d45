#include "cache_layer.h"

namespace vattn::kernels {

void store(const CacheLayer& layer, const CacheCall& call, int threads) {
  const auto rows = [&](Store store, const TokenRows& source) {
    store.tokens = call.tokens;
    store.source = source.data;
    store.source_token = source.token_stride;
    store.source_head = source.head_stride;
    store.slots = call.places.slots;
    store.positions = call.places.positions;
    return store;
  };
  store(rows(layer.key, call.key), threads);
  store(rows(layer.value, call.value), threads);
}

void attend(const CacheLayer& layer, const CacheCall& call, const Kernels& kernels, int threads) {
  Attention a = layer.attention;
  a.count = call.count;
  a.slots = call.slots;
  a.lengths = call.lengths;
  a.starts = call.starts;
  a.query = call.query.data;
  a.query_token_stride = call.query.token_stride;
  a.query_head_stride = call.query.head_stride;
  a.output = call.output;
  a.threads = threads;
  attend(a, kernels);
}

}  // namespace vattn::kernels
