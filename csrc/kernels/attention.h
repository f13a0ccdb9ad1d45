// Attention for CPUs: queries of new tokens over the keys and values of a cache, read in place.
//
// Nothing here knows torch or a driver; a call is a struct of pointers, sizes and strides in bytes. No byte is read
// that is not part of a row below a request's length: what follows may be unmapped.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

namespace vattn::kernels {

enum class Type : std::uint8_t { kFloat32, kBFloat16, kFloat16, kInt8 };

constexpr std::int64_t size_of(Type type) { return type == Type::kFloat32 ? 4 : type == Type::kInt8 ? 1 : 2; }

// Rows of a layer's keys, values or scales; the elements of a row are neighbours.
struct Rows {
  const std::byte* data = nullptr;
  std::int64_t slot_stride = 0;  // of a slot, or of a block where there is a block table
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
};

// The slot of each, its length with the new tokens, and the first row of its queries; the last entry of `starts` is the
// number of rows. Without `slots`, request i is in slot i; without `starts`, each has one query.
struct Requests {
  int count;
  const std::int32_t* slots;
  const std::int32_t* lengths;
  const std::int32_t* starts;

  // A block table `[slots, *]`, where keys and values lie in blocks.
  const std::int32_t* table;
  std::int64_t table_stride;
  int block_size;

  int slot(int request) const { return slots ? slots[request] : request; }
  int num_new(int request) const { return starts ? starts[request + 1] - starts[request] : 1; }
};

struct Attention : Requests {
  Type query_type;   // of queries and output
  Type stored_type;  // of keys and values: the query's, or codes
  Type scale_type;   // of the scales of codes, which are not negative
  int num_heads, num_kv_heads, head_dim, v_head_dim;

  const std::byte* query;
  std::int64_t query_token_stride, query_head_stride;
  std::byte* output;  // [tokens, num_heads, v_head_dim], contiguous
  Rows key, value, key_scale, value_scale;

  float scale;
  float softcap;  // 0 for none
  int window;     // a query sees this many keys, itself included; 0 for all
  const float* sinks;
  int threads;

  int group() const { return num_heads / num_kv_heads; }
};

// What there is: rows of queries, slots, tokens of each, and blocks where there is a block table.
struct Bounds {
  std::int64_t rows, slots, tokens, blocks;
};

// Which numbers of the requests do not fit that, and their range. Starts have to begin with 0, rise, and end with
// `rows`.
enum class Wrong : std::uint8_t { kNothing, kStarts, kLengths, kSlots, kBlocks };
struct Finding {
  Wrong wrong = Wrong::kNothing;
  std::int64_t least = 0, most = 0;
};
Finding check(const Requests& requests, const Bounds& bounds);

// A part of the work: some query tokens of a request, some heads, and a stretch of its keys.
struct Item {
  int request;
  int head, num_heads;    // of keys and values
  int token, num_tokens;  // among the request's new ones
  int begin, end;         // keys
  std::int64_t partial;   // where among the partial results this one goes; -1 for a result that is whole
};

// Items that threads take one after another.
class Queue {
 public:
  explicit Queue(std::span<const Item> items) : items_(items) {}
  const Item* take();  // null when there are no more

 private:
  std::span<const Item> items_;
  std::atomic<std::size_t> taken_ = 0;
};

constexpr int kBlock = 128;  // keys between two updates of a row's maximum
constexpr int kPanels = 4;   // vectors of keys that are scored together
constexpr int kMaxLanes = 16;

// Memory of a thread for one item, in elements of four bytes.
struct Scratch {
  float* partials;         // of all threads; a row is its maximum, its total, and its sums in whole vectors
  std::uint32_t* queries;  // [rows, query_stride]
  std::uint32_t* keys;     // [kPanels, head_dim, lanes]
  std::uint32_t* values;   // [vectors of v_head_dim, kBlock, lanes]
  float* scores;           // [rows of a head, kBlock]
  std::uint32_t* weights;  // [rows of a head, kBlock]
  float* sums;             // [rows, sum_stride]
  float *maximum, *factor, *packed, *rescale;  // factors of packed queries, and of packed weights
  float* total;                                // [rows, lanes]
  std::uint32_t* lanes;                        // [num_kv_heads, head_dim, kMaxLanes]; for heads of 4 and more
  float* zeros;                                // [sum_stride]
  const std::byte** places;                    // [5, kBlock]
  float* scales;                               // [2, kBlock]
};

// Elements of a row of sums: a multiple of what any kernel lays out together.
constexpr std::int64_t sum_stride(const Attention& a) { return (a.v_head_dim + 63) / 64 * 64; }

// How a kernel that can do both takes the keys of few rows of queries: as is faster, as they lie, or in panels.
enum class Keys : std::uint8_t { kFaster, kInPlace, kInPanels };
inline std::atomic<Keys> keys_taken = Keys::kFaster;

struct Norm;
struct Rotation;
struct Gate;
struct Linear;
struct LinearItem;

// The kernels of one instruction set. What is null is as in `base`.
struct Kernels {
  const char* name;
  const char* needs;  // what a CPU must have
  const Kernels* base;
  int lanes;
  bool (*supported)();
  bool (*worthwhile)();  // whether they are faster than the ones after them, if that is not sure: a measurement
  // Where they choose: whether 8-bit keys of more than a few rows are faster in panels, of keys with gaps between them
  // and of gapless ones; measured.
  bool* panels_are_faster;
  bool linear_layers;  // whether what linear.h has is faster than torch's layers of bfloat16
  // Computes items of a queue until there are no more; by the type of what is stored.
  void (*attend[4])(const Attention&, Queue&, const Scratch&);
  // Writes a row's result, of `count` partial ones that are `stride` floats apart.
  void (*merge)(const Attention&, const float* partial, int count, std::int64_t stride, std::byte* output);
  // One row or token of what layers.h has.
  void (*norm)(const Norm&, std::int64_t);
  void (*rotation)(const Rotation&, std::int64_t);
  void (*gate)(const Gate&, std::int64_t);
  // A row's input, and an item, of what linear.h has; without the former, items take rows as they are.
  void (*linear_row)(const Linear&, std::int64_t, float* out);
  void (*linear)(const Linear&, const LinearItem&);
  // A thread's share of what roofline.h has; products by the type of what is stored.
  void (*products[4])(std::int64_t count);
  void (*read)(const std::byte* data, std::int64_t bytes);
};

// All that this build has, the fastest first, with nothing null that they have; the last one is supported everywhere.
std::span<const Kernels> kernels();

void attend(const Attention&, const Kernels&);

}  // namespace vattn::kernels
