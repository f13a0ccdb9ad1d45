#include "attention.h"

#include <omp.h>

#include <algorithm>
#include <vector>

#include "room.h"
#include "timing.h"

namespace vattn::kernels {

#ifndef VATTN_KERNELS  // those that the build has, each followed by a comma
#define VATTN_KERNELS
#endif
extern const Kernels VATTN_KERNELS portable_kernels;

namespace {

// Few keys, in cache: what differs are products, and what prepares them.
void measure_panels(const Kernels& k) {
  constexpr int kTokens = 2 * kBlock, kHeads = 2, kDim = 64, kMostRows = 16;
  const std::int32_t length = kTokens;
  const std::vector<std::int8_t> codes(kTokens * kHeads * kDim, 1);
  const std::vector<float> scales(kTokens * kHeads, 1), query(kHeads * kMostRows * kDim, 1);
  std::vector<float> output(query.size());
  const auto bytes = [](const auto& all) { return reinterpret_cast<const std::byte*>(all.data()); };
  for (const bool gapless : {false, true}) {
    Attention a{};
    a.count = 1;
    a.lengths = &length;
    a.stored_type = Type::kInt8;
    a.num_heads = kHeads * (gapless ? kMostRows / 2 : kMostRows);
    a.num_kv_heads = kHeads;
    a.head_dim = a.v_head_dim = kDim;
    a.query = bytes(query);
    a.query_head_stride = kDim * sizeof(float);
    a.output = reinterpret_cast<std::byte*>(output.data());
    a.key.data = bytes(codes);
    a.key.token_stride = gapless ? kDim : kHeads * kDim;
    a.key.head_stride = gapless ? kTokens * kDim : kDim;
    a.value = a.key;
    a.key_scale = a.value_scale = {bytes(scales), 0, sizeof(float), kTokens * sizeof(float)};
    a.scale = 1;
    a.threads = 1;
    const auto time = [&](bool panels) {
      k.panels_are_faster[gapless] = panels;
      return seconds([&] { attend(a, k); });
    };
    const double in_place = time(false);
    k.panels_are_faster[gapless] = time(true) < in_place;
  }
}

}  // namespace

std::span<const Kernels> kernels() {
  // Joined here: code of theirs must not run before a CPU is known to have what it needs. Never destroyed: threads may
  // still run them when the process ends.
  static const auto& all = *new std::vector<Kernels>([] {
    std::vector<Kernels> joined{VATTN_KERNELS portable_kernels};
    for (Kernels& k : joined)
      for (const Kernels* base = k.base; base; base = base->base) {
        const auto inherit = [](auto& mine, auto theirs) { mine = mine ? mine : theirs; };
        for (int i = 0; i < 4; ++i) {
          inherit(k.attend[i], base->attend[i]);
          inherit(k.products[i], base->products[i]);
        }
        inherit(k.panels_are_faster, base->panels_are_faster);
        inherit(k.merge, base->merge);
        inherit(k.norm, base->norm);
        inherit(k.rotation, base->rotation);
        inherit(k.gate, base->gate);
        if (!k.linear) k.linear_row = base->linear_row;  // null where rows are taken as they are
        inherit(k.linear, base->linear);
        inherit(k.read, base->read);
      }
    for (const Kernels& k : joined)
      if (k.panels_are_faster && k.supported()) {
        measure_panels(k);
        break;  // the others have the same choice
      }
    return joined;
  }());
  return all;
}

Finding check(const Requests& r, const Bounds& bounds) {
  const std::int64_t begin = r.starts ? r.starts[0] : 0, end = r.starts ? r.starts[r.count] : r.count;
  bool rises = true;
  for (int i = 0; r.starts && i < r.count; ++i) rises &= r.starts[i] < r.starts[i + 1];
  if (begin != 0 || end != bounds.rows || !rises) return {Wrong::kStarts, begin, end};

  Finding lengths{Wrong::kLengths, INT64_MAX, INT64_MIN}, slots = lengths, blocks = lengths;
  const auto add = [](Finding& finding, std::int64_t number) {
    finding.least = std::min(finding.least, number);
    finding.most = std::max(finding.most, number);
  };
  bool holds_new = true;
  for (int i = 0; i < r.count; ++i) {
    add(lengths, r.lengths[i]);
    add(slots, r.slot(i));
    holds_new &= r.lengths[i] >= r.num_new(i);
  }
  slots.wrong = Wrong::kSlots;
  blocks.wrong = Wrong::kBlocks;
  if (lengths.most > bounds.tokens || !holds_new) return lengths;
  if (slots.least < 0 || slots.most >= bounds.slots) return slots;
  for (int i = 0; r.table && i < r.count; ++i)
    for (std::int64_t block = 0; block * r.block_size < r.lengths[i]; ++block)
      add(blocks, r.table[r.slot(i) * r.table_stride + block]);
  if (blocks.least < 0 || blocks.most >= bounds.blocks) return blocks;
  return {};
}

const Item* Queue::take() {
  const std::size_t i = taken_.fetch_add(1, std::memory_order_relaxed);
  return i < items_.size() ? &items_[i] : nullptr;
}

namespace {

constexpr int kRows = 128;   // of a head in an item: their sums stay in the second cache
constexpr int kMost = 64;    // items of a request that are enough for the threads; fewer are divided by keys
constexpr int kKeys = 1024;  // that are worth a part: each starts anew, which takes as long as 20 keys

// Partial results of one stretch of queries: `count` of them, `stride` floats apart.
struct Merge {
  Item item;
  int count;
  std::int64_t stride;
};

struct Plan {
  std::vector<Item> items;
  std::vector<Merge> merges;
  std::int64_t partial = 0;  // floats
  int rows = 0;              // most of an item

  // Adds an item, in up to so many parts if it has many keys.
  void add(Item item, const Attention& a, std::int64_t most_parts) {
    // Numbers close to the largest length exceed 32 bits when they are rounded up.
    const std::int64_t begin = item.begin, end = item.end, keys = end - begin;
    const std::int64_t parts = std::min((keys + kKeys - 1) / kKeys, most_parts);
    if (parts <= 1) {
      items.push_back(item);
      return;
    }
    // Whole blocks, but for the last part.
    const std::int64_t part = (keys + parts * kBlock - 1) / (parts * kBlock) * kBlock;
    const std::int64_t stride = item.num_tokens * a.group() * item.num_heads * (sum_stride(a) + 2);
    Merge& merge = merges.emplace_back(item, 0, stride);
    merge.item.partial = partial;
    for (std::int64_t at = begin; at < end; at += part) {
      item.begin = static_cast<int>(at);
      item.end = static_cast<int>(std::min(end, at + part));
      item.partial = partial;
      partial += stride;
      ++merge.count;
      items.push_back(item);
    }
  }
};

// What an item computes, and so the order of its sums, follows from its own request: neither other requests nor the
// number of threads change a result.
Plan plan(const Attention& a) {
  Plan plan;
  // Where the heads of a token are neighbours, an item takes all heads, so that memory is read in order.
  const bool together = a.key.head_stride < a.key.token_stride;
  const int heads = together ? a.num_kv_heads : 1;
  const int tokens = std::max(1, kRows / a.group());
  for (int i = 0; i < a.count; ++i) {
    const int num_new = a.num_new(i);
    const std::int64_t blocks = (num_new + tokens - 1) / tokens, items = blocks * (a.num_kv_heads / heads);
    const std::int64_t parts = items ? (kMost + items - 1) / items : 1;
    // The last tokens have the most keys: what takes longest comes first, so that threads end together.
    for (std::int64_t block = blocks; block-- > 0;) {
      const int token = static_cast<int>(block) * tokens;
      const int count = std::min(tokens, num_new - token);
      const int position = a.lengths[i] - num_new + token;
      const int begin = a.window ? std::max(0, position - a.window + 1) : 0;
      for (int head = 0; head < a.num_kv_heads; head += heads)
        plan.add({i, head, heads, token, count, begin, position + count, -1}, a, parts);
      plan.rows = std::max(plan.rows, count * a.group() * heads);
    }
  }
  return plan;
}

// Lays out a thread's memory from `at` on; returns how much it takes.
std::size_t lay_out(const Attention& a, const Plan& plan, int lanes, std::byte* at, Scratch& s) {
  std::size_t used = 0;
  const auto take = [&]<class T>(T*& field, std::int64_t count) {
    field = reinterpret_cast<T*>(at + used);
    used += aligned(count * sizeof(T));
  };
  const std::int64_t width = sum_stride(a), rows = plan.rows + kMaxLanes;
  take(s.queries, rows * (a.head_dim + 2));
  take(s.keys, std::int64_t{kPanels} * a.head_dim * lanes);
  take(s.values, width * kBlock);
  take(s.scores, rows * kBlock);
  take(s.weights, rows * kBlock);
  take(s.sums, (rows + std::int64_t{a.num_kv_heads} * kMaxLanes) * width);
  for (float** field : {&s.maximum, &s.factor, &s.packed, &s.rescale}) take(*field, rows);
  take(s.total, rows * lanes);
  take(s.lanes, std::int64_t{a.num_kv_heads} * a.head_dim * kMaxLanes);
  take(s.zeros, width);
  take(s.places, 5 * kBlock);
  take(s.scales, 2 * kBlock);
  return used;
}

void merge(const Attention& a, const Kernels& k, const Merge& merge, const float* partials) {
  const Item& item = merge.item;
  const std::int64_t width = sum_stride(a) + 2;
  const float* partial = partials + item.partial;
  const int first = (a.starts ? a.starts[item.request] : item.request) + item.token;
  for (int head = 0; head < item.num_heads; ++head)
    for (int token = 0; token < item.num_tokens; ++token)
      for (int g = 0; g < a.group(); ++g, partial += width) {
        const std::int64_t row = std::int64_t{first + token} * a.num_heads + (item.head + head) * a.group() + g;
        k.merge(a, partial, merge.count, merge.stride, a.output + row * a.v_head_dim * size_of(a.query_type));
      }
}

}  // namespace

void attend(const Attention& a, const Kernels& k) {
  const Plan todo = plan(a);
  if (todo.items.empty()) return;
  Scratch measure;
  const std::size_t each = lay_out(a, todo, k.lanes, nullptr, measure);
  const int num_items = static_cast<int>(todo.items.size()), num_merges = static_cast<int>(todo.merges.size());
  // All threads, or one: OpenMP's runtime ends those that a smaller team leaves out, and the next product makes them
  // anew.
  const int threads = num_items > 1 ? a.threads : 1;
  const std::size_t partial = aligned(todo.partial * sizeof(float));
  static thread_local Room room;
  Queue queue(todo.items);
  std::byte* memory = room.reserve(partial + static_cast<std::size_t>(threads) * each);

#pragma omp parallel num_threads(threads)
  {
    Scratch scratch;
    lay_out(a, todo, k.lanes, memory + partial + static_cast<std::size_t>(omp_get_thread_num()) * each, scratch);
    scratch.partials = reinterpret_cast<float*>(memory);
    k.attend[static_cast<int>(a.stored_type)](a, queue, scratch);
    if (num_merges) {
#pragma omp barrier
#pragma omp for schedule(dynamic) nowait
      for (int i = 0; i < num_merges; ++i) merge(a, k, todo.merges[i], scratch.partials);
    }
  }
}

}  // namespace vattn::kernels
