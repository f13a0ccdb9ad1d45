// The attention kernels against a plain computation, over memory in which a row is followed by nothing.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "kernels/attention.h"
#include "kernels/largest.h"
#include "kernels/linear.h"
#include "kernels/roofline.h"

namespace {

using namespace vattn::kernels;

// Bytes that end where the next page cannot be read.
class Guarded {
 public:
  explicit Guarded(std::size_t bytes) {
    const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t whole = (bytes + page - 1) / page * page;
    size_ = whole + page;
    base_ = static_cast<std::byte*>(mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    CHECK(base_ != MAP_FAILED);
    CHECK(mprotect(base_ + whole, page, PROT_NONE) == 0);
    data_ = base_ + whole - bytes;
  }
  ~Guarded() { munmap(base_, size_); }
  Guarded(const Guarded&) = delete;
  std::byte* data() const { return data_; }

 private:
  std::byte *base_, *data_;
  std::size_t size_;
};

void put(Type type, std::byte* at, float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (type == Type::kFloat32) {
    std::memcpy(at, &bits, 4);
    return;
  }
  std::uint16_t half = static_cast<std::uint16_t>(bits >> 16);
  if (type == Type::kFloat16) {
    // What is less than a normal number becomes 0.
    const std::uint32_t exponent = (bits >> 23) & 0xff;
    half = static_cast<std::uint16_t>((bits >> 16) & 0x8000);
    if (exponent > 112) half |= static_cast<std::uint16_t>((exponent - 112) << 10 | ((bits >> 13) & 0x3ff));
  }
  std::memcpy(at, &half, 2);
}

float get(Type type, const std::byte* at) {
  if (type == Type::kInt8) return static_cast<float>(static_cast<std::int8_t>(*at));
  std::uint32_t bits = 0;
  if (type == Type::kFloat32) {
    std::memcpy(&bits, at, 4);
  } else {
    std::uint16_t half;
    std::memcpy(&half, at, 2);
    if (type == Type::kFloat16) {
      const float size = std::ldexp(static_cast<float>((half & 0x3ff) | (half & 0x7c00 ? 0x400 : 0)),
                                    std::max((half >> 10) & 31, 1) - 25);
      return half & 0x8000 ? -size : size;
    }
    bits = static_cast<std::uint32_t>(half) << 16;
  }
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

struct Types {
  Type query, stored, scale;
};

struct Shape {
  int kv_heads, group, head_dim, v_head_dim;
  std::vector<std::int32_t> lengths, new_tokens;
  int window;
};

// How rows lie in memory, and how the work is done.
struct Way {
  bool heads_first;
  int block_size, threads;
};

void compare(const Kernels& kernels, const Types& types, const Shape& shape, const Way& way, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  const int count = static_cast<int>(shape.lengths.size()), heads = shape.kv_heads * shape.group;
  std::vector<std::int32_t> starts{0}, slots(count), table;
  for (int n : shape.new_tokens) starts.push_back(starts.back() + n);
  // The longest request is in the last slot, and its last block is the last one: behind its last token is nothing.
  const int longest = *std::max_element(shape.lengths.begin(), shape.lengths.end());
  const int last =
      static_cast<int>(std::find(shape.lengths.begin(), shape.lengths.end(), longest) - shape.lengths.begin());
  for (int i = 0; i < count; ++i) slots[i] = (i - last + 2 * count - 1) % count;
  const int blocks = way.block_size ? (longest + way.block_size - 1) / way.block_size : 0;
  for (int i = 0; i < count * blocks; ++i) table.push_back((count * blocks - 1 - i) * 7 % (count * blocks));
  if (blocks) std::swap(*std::find(table.begin(), table.end(), count * blocks - 1), table.back());
  const int unit = blocks ? way.block_size : longest;  // tokens of a slot or a block
  const int units = blocks ? count * blocks : count;
  const std::int64_t tokens = std::int64_t{units - 1} * unit + (longest - 1) % unit + 1;

  const auto place = [&](Type type, int dim, std::vector<std::unique_ptr<Guarded>>& keep, auto fill) {
    const std::int64_t row = dim * size_of(type);
    keep.push_back(std::make_unique<Guarded>(static_cast<std::size_t>(shape.kv_heads * tokens * row)));
    std::byte* data = keep.back()->data();
    for (std::int64_t i = 0; i < shape.kv_heads * tokens * dim; ++i) fill(data + i * size_of(type));
    const std::int64_t token = way.heads_first ? row : shape.kv_heads * row;
    return Rows{data, unit * token, token, way.heads_first ? tokens * row : row};
  };
  const auto fill_row = [&](std::byte* at) {
    if (types.stored == Type::kInt8)
      *at = static_cast<std::byte>(static_cast<int>(uniform(random) * 127));
    else
      put(types.stored, at, uniform(random));
  };
  std::vector<std::unique_ptr<Guarded>> keep;
  Attention a{};
  a.query_type = types.query;
  a.stored_type = types.stored;
  a.scale_type = types.scale;
  a.num_heads = heads;
  a.num_kv_heads = shape.kv_heads;
  a.head_dim = shape.head_dim;
  a.v_head_dim = shape.v_head_dim;
  a.key = place(types.stored, shape.head_dim, keep, fill_row);
  a.value = place(types.stored, shape.v_head_dim, keep, fill_row);
  if (types.stored == Type::kInt8)
    for (Rows* scales : {&a.key_scale, &a.value_scale})
      *scales =
          place(types.scale, 1, keep, [&](std::byte* at) { put(types.scale, at, std::fabs(uniform(random)) / 64); });
  const std::int64_t query_size = size_of(types.query);
  Guarded query(static_cast<std::size_t>(starts.back() * heads * shape.head_dim * query_size));
  for (std::int64_t i = 0; i < std::int64_t{starts.back()} * heads * shape.head_dim; ++i)
    put(types.query, query.data() + i * query_size, uniform(random));
  Guarded output(static_cast<std::size_t>(starts.back() * heads * shape.v_head_dim * query_size));
  a.query = query.data();
  a.query_head_stride = shape.head_dim * query_size;
  a.query_token_stride = heads * a.query_head_stride;
  a.output = output.data();
  a.count = count;
  a.slots = slots.data();
  a.lengths = shape.lengths.data();
  a.starts = starts.data();
  a.table = blocks ? table.data() : nullptr;
  a.table_stride = blocks;
  a.block_size = way.block_size;
  a.scale = 1 / std::sqrt(static_cast<float>(shape.head_dim));
  a.window = shape.window;
  a.threads = way.threads;
  attend(a, kernels);

  const auto at = [&](const Rows& rows, int slot, int token, int head) {
    const std::int64_t number = blocks ? table[slot * blocks + token / way.block_size] : slot;
    return rows.data + number * rows.slot_stride + (blocks ? token % way.block_size : token) * rows.token_stride +
           head * rows.head_stride;
  };
  // Over codes, queries and weights are integers of 16 bits, and values are as large as 2.
  const double exact = types.stored == Type::kInt8 ? 6e-5 : 2e-5;
  const double bound = types.query == Type::kFloat32 ? exact : types.query == Type::kFloat16 ? 3e-3 : 2e-2;
  for (int i = 0; i < count; ++i)
    for (int t = 0; t < shape.new_tokens[i]; ++t)
      for (int h = 0; h < heads; ++h) {
        const int position = shape.lengths[i] - shape.new_tokens[i] + t, head = h / shape.group;
        const int first = shape.window ? std::max(0, position - shape.window + 1) : 0;
        std::vector<double> sums(shape.v_head_dim);
        double total = 0;
        for (int token = first; token <= position; ++token) {
          double score = 0;
          for (int d = 0; d < shape.head_dim; ++d)
            score += double{get(types.query, a.query + (starts[i] + t) * a.query_token_stride +
                                                 h * a.query_head_stride + d * query_size)} *
                     get(types.stored, at(a.key, slots[i], token, head) + d * size_of(types.stored));
          if (a.key_scale.data) score *= get(types.scale, at(a.key_scale, slots[i], token, head));
          const double weight = std::exp(score * a.scale);
          total += weight;
          const double scale = a.value_scale.data ? get(types.scale, at(a.value_scale, slots[i], token, head)) : 1;
          for (int d = 0; d < shape.v_head_dim; ++d)
            sums[d] +=
                weight * scale * get(types.stored, at(a.value, slots[i], token, head) + d * size_of(types.stored));
        }
        for (int d = 0; d < shape.v_head_dim; ++d) {
          const std::int64_t index = ((starts[i] + t) * std::int64_t{heads} + h) * shape.v_head_dim + d;
          const double got = get(types.query, output.data() + index * query_size);
          CHECK(std::fabs(got - sums[d] / total) < bound);
        }
      }
}

// The items of one request, in their order.
std::vector<Item> items(int kv_heads, int group, int length, int num_new) {
  static std::vector<Item> taken;
  taken.clear();
  Kernels recording = kernels().back();
  recording.attend[static_cast<int>(Type::kFloat32)] = [](const Attention&, Queue& queue, const Scratch&) {
    while (const Item* item = queue.take()) taken.push_back(*item);
  };
  recording.merge = [](const Attention&, const float*, int, std::int64_t, std::byte*) {};
  constexpr int kDim = 8;
  const std::int32_t starts[] = {0, num_new};
  std::vector<float> output(static_cast<std::size_t>(num_new * kv_heads * group * kDim));
  Attention a{};
  a.count = 1;
  a.lengths = &length;
  a.starts = starts;
  a.num_heads = kv_heads * group;
  a.num_kv_heads = kv_heads;
  a.head_dim = a.v_head_dim = kDim;
  a.key.token_stride = kDim * 4;
  a.key.head_stride = length * a.key.token_stride;
  a.output = reinterpret_cast<std::byte*>(output.data());
  a.threads = 1;
  attend(a, recording);
  return taken;
}

TEST(a_long_request_is_divided_among_many_threads) {
  for (const int kv_heads : {1, 2, 8, 32}) {
    const std::vector<Item> found = items(kv_heads, 4, 1 << 17, 1);
    CHECK(found.size() == 64);
    std::int64_t keys = 0;
    for (const Item& item : found) keys += item.end - item.begin;
    CHECK(keys == std::int64_t{kv_heads} << 17);
  }
  CHECK(items(8, 4, 1500, 1).size() == 16);
  CHECK(items(8, 4, 1024, 1).size() == 8);
}

TEST(what_takes_longest_comes_first) {
  const std::vector<Item> found = items(8, 4, 512, 512);
  CHECK(found.size() == 128);
  for (std::size_t i = 1; i < found.size(); ++i) CHECK(found[i].end <= found[i - 1].end);
}

void compare_all(const Types& types) {
  const Shape shapes[] = {
      {2, 7, 64, 64, {1, 127, 300}, {1, 1, 1}, 0},
      {1, 3, 40, 8, {129, 16, 700}, {2, 16, 1}, 0},
      {3, 1, 8, 72, {200, 131}, {30, 1}, 50},
      {2, 1, 24, 16, {5}, {1}, 0},
      {1, 2, 16, 24, {128}, {1}, 0},
      {3, 1, 16, 16, {256, 100}, {3, 1}, 0},
  };
  for (const Kernels& kernels : kernels()) {
    if (!kernels.supported()) continue;
    unsigned seed = 0;
    for (int threads : {1, 3})
      for (int block_size : {0, 8, 24})
        for (const Shape& shape : shapes) {
          const bool heads_first = (seed + seed / std::size(shapes)) % 2;
          check::context = std::string(kernels.name) + (heads_first ? ", heads first" : ", tokens first") +
                           ", blocks of " + std::to_string(block_size) + ", case " + std::to_string(seed);
          compare(kernels, types, shape, {heads_first, block_size, threads}, ++seed);
        }
  }
}

void compare_linear(const Kernels& kernels, std::int64_t n, std::int64_t in, std::int64_t out, bool gated,
                    int threads) {
  std::mt19937 random(static_cast<unsigned>(n + in + out));
  std::uniform_real_distribution<float> uniform(-1, 1);
  const auto filled = [&](std::int64_t count) {
    auto made = std::make_unique<Guarded>(static_cast<std::size_t>(count * 2));
    for (std::int64_t i = 0; i < count; ++i) put(Type::kBFloat16, made->data() + 2 * i, uniform(random));
    return made;
  };
  const auto element = [](const Guarded& from, std::int64_t i) {
    return double{get(Type::kBFloat16, from.data() + 2 * i)};
  };
  const std::int64_t weights = gated ? 2 : 1;
  const auto input = filled(n * in), weight = filled(weights * out * in), bias = filled(weights * out);
  const auto other = filled(n * out);
  const std::int64_t lanes = kernels.lanes, panels = (out + lanes - 1) / lanes;
  Guarded packed(static_cast<std::size_t>(weights * panels * in / 2 * lanes * 4));
  Guarded output(static_cast<std::size_t>(n * out * 2));
  for (std::int64_t part = 0; part < weights; ++part)
    for (std::int64_t row = 0; row < panels * lanes; ++row)
      for (std::int64_t i = 0; i < in; ++i) {
        const std::int64_t panel = row / lanes * weights + part;
        put(Type::kBFloat16, packed.data() + ((panel * (in / 2) + i / 2) * lanes + row % lanes) * 4 + i % 2 * 2,
            row < out ? get(Type::kBFloat16, weight->data() + 2 * ((part * out + row) * in + i)) : 0.0f);
      }
  const auto* words = reinterpret_cast<const std::uint32_t*>(packed.data());
  compute(Linear{n, input->data(), in * 2, {in, out, gated, words, bias->data()}, other->data(), output.data()},
          kernels, threads);
  for (std::int64_t r = 0; r < n; ++r)
    for (std::int64_t c = 0; c < out; ++c) {
      const auto product = [&](std::int64_t row) {
        double sum = element(*bias, row);
        for (std::int64_t i = 0; i < in; ++i) sum += element(*input, r * in + i) * element(*weight, row * in + i);
        return sum;
      };
      double expected = product(c);
      if (gated) expected *= product(out + c) / (1 + std::exp(-expected));
      expected += element(*other, r * out + c);
      CHECK(std::fabs(element(output, r * out + c) - expected) < 0.005 * std::fabs(expected) + 1e-3);
    }
}

}  // namespace

TEST(linear) {
  for (const Kernels& kernels : kernels()) {
    if (!kernels.supported() || !kernels.linear) continue;
    check::context = kernels.name;
    for (int threads : {1, 3})
      for (bool gated : {false, true}) {
        compare_linear(kernels, 1, 2, 1, gated, threads);
        compare_linear(kernels, 9, 70, 50, gated, threads);
        compare_linear(kernels, 270, 530, 33, gated, threads);
      }
  }
}
constexpr Type kNone = Type::kFloat32;  // of scales that are not there

TEST(float32) { compare_all({Type::kFloat32, Type::kFloat32, kNone}); }
TEST(bfloat16) { compare_all({Type::kBFloat16, Type::kBFloat16, kNone}); }
TEST(float16) { compare_all({Type::kFloat16, Type::kFloat16, kNone}); }
TEST(codes_for_float32) { compare_all({Type::kFloat32, Type::kInt8, Type::kFloat32}); }
TEST(codes_for_bfloat16) { compare_all({Type::kBFloat16, Type::kInt8, Type::kFloat32}); }
TEST(codes_with_small_scales) {
  for (Type query : {Type::kFloat32, Type::kBFloat16, Type::kFloat16})
    compare_all({query, Type::kInt8, Type::kBFloat16});
}
// They return nothing; sanitizers and guarded pages see what they do.
TEST(limits) {
  for (const Kernels& k : vattn::kernels::kernels()) {
    if (!k.supported()) continue;
    for (const int threads : {1, 3}) {
      for (const Type type : {Type::kFloat32, Type::kBFloat16, Type::kFloat16, Type::kInt8})
        products(k, type, 5000, threads);
      for (const std::int64_t bytes : {0, 63, 64, 100, 64 * 37, 10'000}) {
        const Guarded memory(static_cast<std::size_t>(bytes));
        read(k, memory.data(), bytes, threads);
      }
    }
  }
}

TEST(largest) {
  constexpr std::int64_t kRows = 3;
  for (const Type type : {Type::kFloat32, Type::kBFloat16, Type::kFloat16})
    for (const std::int64_t width : {1, 2, 511, 512, 513, 1025, 40000})
      for (const std::int64_t place : {std::int64_t{0}, width / 2, width - 1}) {
        const Guarded rows(static_cast<std::size_t>(kRows * width * size_of(type)));
        for (std::int64_t i = 0; i < kRows * width; ++i) put(type, rows.data() + i * size_of(type), -2);
        for (std::int64_t row = 0; row < kRows; ++row)
          put(type, rows.data() + (row * width + place) * size_of(type), row == 1 ? -1.5F : 3);
        std::vector<std::int64_t> indices(kRows, -1);
        CHECK(vattn::kernels::compute(Largest{type, kRows, width, width, rows.data(), indices.data()}, 2));
        CHECK(indices == std::vector<std::int64_t>(kRows, place));
      }
}

TEST(the_last_one_runs_everywhere) { CHECK(vattn::kernels::kernels().back().supported()); }
