// The attention kernels against a plain computation, over memory in which a row is followed by nothing.
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "kernels/attention.h"
#include "kernels/linear.h"

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
  } else {
    const std::uint16_t high = static_cast<std::uint16_t>(bits >> 16);
    std::memcpy(at, &high, 2);
  }
}

float get(Type type, const std::byte* at) {
  if (type == Type::kInt8) return static_cast<float>(static_cast<std::int8_t>(*at));
  std::uint32_t bits = 0;
  if (type == Type::kFloat32) {
    std::memcpy(&bits, at, 4);
  } else {
    std::uint16_t high;
    std::memcpy(&high, at, 2);
    bits = static_cast<std::uint32_t>(high) << 16;
  }
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

struct Shape {
  Type query_type, stored_type;
  int kv_heads, group, head_dim, v_head_dim;
  std::vector<std::int32_t> lengths, new_tokens;
  int window, block_size, threads;
};

void compare(const Kernels& kernels, const Shape& shape, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  const int count = static_cast<int>(shape.lengths.size()), heads = shape.kv_heads * shape.group;
  std::vector<std::int32_t> starts{0}, slots, table;
  for (int n : shape.new_tokens) starts.push_back(starts.back() + n);
  int longest = 0;
  for (int length : shape.lengths) longest = std::max(longest, length);
  const int blocks = shape.block_size ? (longest + shape.block_size - 1) / shape.block_size : 0;
  for (int i = 0; i < count; ++i) slots.push_back(count - 1 - i);
  for (int i = 0; i < count * blocks; ++i) table.push_back((i * 7 + 3) % (count * blocks));

  // Tokens of a head are neighbours, and the last one's row is followed by nothing.
  const std::int64_t size = size_of(shape.stored_type),
                     rows = blocks ? std::int64_t{count} * blocks * shape.block_size : std::int64_t{count} * longest;
  const auto fill = [&](int dim, std::vector<std::unique_ptr<Guarded>>& keep, Rows& place) {
    const std::int64_t token = dim * size, head = rows * token;
    keep.push_back(std::make_unique<Guarded>(static_cast<std::size_t>(shape.kv_heads * head)));
    std::byte* data = keep.back()->data();
    for (std::int64_t i = 0; i < shape.kv_heads * rows * dim; ++i) {
      if (shape.stored_type == Type::kInt8)
        data[i] = static_cast<std::byte>(static_cast<int>(uniform(random) * 127));
      else
        put(shape.stored_type, data + i * size, uniform(random));
    }
    place = {data, (blocks ? shape.block_size : longest) * token, token, head};
  };
  std::vector<std::unique_ptr<Guarded>> keep;
  Attention a{};
  a.query_type = shape.query_type;
  a.stored_type = shape.stored_type;
  a.scale_type = Type::kFloat32;
  a.num_heads = heads;
  a.num_kv_heads = shape.kv_heads;
  a.head_dim = shape.head_dim;
  a.v_head_dim = shape.v_head_dim;
  fill(shape.head_dim, keep, a.key);
  fill(shape.v_head_dim, keep, a.value);
  if (shape.stored_type == Type::kInt8) {
    for (Rows* place : {&a.key_scale, &a.value_scale}) {
      keep.push_back(std::make_unique<Guarded>(static_cast<std::size_t>(shape.kv_heads * rows * 4)));
      for (std::int64_t i = 0; i < shape.kv_heads * rows; ++i)
        put(Type::kFloat32, keep.back()->data() + 4 * i, std::fabs(uniform(random)) / 64);
      *place = {keep.back()->data(), (blocks ? shape.block_size : longest) * 4, 4, rows * 4};
    }
  }
  const std::int64_t query_size = size_of(shape.query_type), tokens = starts.back();
  Guarded query(static_cast<std::size_t>(tokens * heads * shape.head_dim * query_size));
  for (std::int64_t i = 0; i < tokens * heads * shape.head_dim; ++i)
    put(shape.query_type, query.data() + i * query_size, uniform(random));
  Guarded output(static_cast<std::size_t>(tokens * heads * shape.v_head_dim * query_size));
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
  a.block_size = shape.block_size;
  a.scale = 1 / std::sqrt(static_cast<float>(shape.head_dim));
  a.window = shape.window;
  a.threads = shape.threads;
  attend(a, kernels);

  const auto at = [&](const Rows& place, int slot, int token, int head) {
    const std::int64_t unit = blocks ? table[slot * blocks + token / shape.block_size] : slot;
    return place.data + unit * place.slot_stride + (blocks ? token % shape.block_size : token) * place.token_stride +
           head * place.head_stride;
  };
  for (int i = 0; i < count; ++i)
    for (int t = 0; t < shape.new_tokens[i]; ++t)
      for (int h = 0; h < heads; ++h) {
        const int position = shape.lengths[i] - shape.new_tokens[i] + t, head = h / shape.group;
        const int first = shape.window ? std::max(0, position - shape.window + 1) : 0;
        std::vector<double> weights, sums(shape.v_head_dim);
        double total = 0;
        for (int token = first; token <= position; ++token) {
          double score = 0;
          for (int d = 0; d < shape.head_dim; ++d)
            score += double{get(shape.query_type, a.query + (starts[i] + t) * a.query_token_stride +
                                                      h * a.query_head_stride + d * query_size)} *
                     get(shape.stored_type, at(a.key, slots[i], token, head) + d * size);
          if (a.key_scale.data) score *= get(Type::kFloat32, at(a.key_scale, slots[i], token, head));
          const double weight = std::exp(score * a.scale);
          total += weight;
          const double scale = a.value_scale.data ? get(Type::kFloat32, at(a.value_scale, slots[i], token, head)) : 1;
          for (int d = 0; d < shape.v_head_dim; ++d)
            sums[d] += weight * scale * get(shape.stored_type, at(a.value, slots[i], token, head) + d * size);
        }
        for (int d = 0; d < shape.v_head_dim; ++d) {
          const std::int64_t index = ((starts[i] + t) * std::int64_t{heads} + h) * shape.v_head_dim + d;
          const double got = get(shape.query_type, output.data() + index * query_size);
          const double error = std::fabs(got - sums[d] / total),
                       bound = shape.query_type == Type::kFloat32 ? 2e-5 : 2e-2;
          CHECK(error < bound);
        }
      }
}

void compare_all(Type query, Type stored) {
  for (const Kernels* kernels : kernels()) {
    if (!kernels->supported()) continue;
    unsigned seed = 0;
    for (int threads : {1, 3})
      for (int block_size : {0, 8, 24}) {
        check::context = std::string(kernels->name) + ", blocks of " + std::to_string(block_size);
        compare(*kernels, {query, stored, 2, 7, 64, 64, {1, 127, 300}, {1, 1, 1}, 0, block_size, threads}, ++seed);
        compare(*kernels, {query, stored, 1, 3, 40, 8, {129, 16, 700}, {2, 16, 1}, 0, block_size, threads}, ++seed);
        compare(*kernels, {query, stored, 3, 1, 8, 72, {200, 131}, {30, 1}, 50, block_size, threads}, ++seed);
      }
  }
}

void compare_linear(const Kernels& kernels, std::int64_t n, std::int64_t in, std::int64_t out, int threads) {
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
  const auto input = filled(n * in), weight = filled(out * in), bias = filled(out), other = filled(n * out);
  const std::int64_t panels = (out + 15) / 16;
  Guarded packed(static_cast<std::size_t>(panels * in / 2 * 64)), output(static_cast<std::size_t>(n * out * 2));
  for (std::int64_t row = 0; row < panels * 16; ++row)
    for (std::int64_t i = 0; i < in; ++i)
      put(Type::kBFloat16, packed.data() + ((row / 16 * (in / 2) + i / 2) * 16 + row % 16) * 4 + i % 2 * 2,
          row < out ? get(Type::kBFloat16, weight->data() + 2 * (row * in + i)) : 0.0f);
  const auto* words = reinterpret_cast<const std::uint32_t*>(packed.data());
  compute(Linear{n, in, out, input->data(), in * 2, words, bias->data(), other->data(), output.data()}, kernels,
          threads);
  for (std::int64_t r = 0; r < n; ++r)
    for (std::int64_t c = 0; c < out; ++c) {
      double sum = element(*bias, c) + element(*other, r * out + c);
      for (std::int64_t i = 0; i < in; ++i) sum += element(*input, r * in + i) * element(*weight, c * in + i);
      CHECK(std::fabs(element(output, r * out + c) - sum) < 0.005 * std::fabs(sum) + 1e-3);
    }
}

}  // namespace

TEST(linear) {
  for (const Kernels* kernels : kernels()) {
    if (!kernels->supported() || !kernels->linear) continue;
    check::context = kernels->name;
    for (int threads : {1, 3}) {
      compare_linear(*kernels, 1, 2, 1, threads);
      compare_linear(*kernels, 9, 70, 50, threads);
      compare_linear(*kernels, 270, 530, 33, threads);
    }
  }
}
TEST(float32) { compare_all(Type::kFloat32, Type::kFloat32); }
TEST(bfloat16) { compare_all(Type::kBFloat16, Type::kBFloat16); }
TEST(codes_for_float32) { compare_all(Type::kFloat32, Type::kInt8); }
TEST(codes_for_bfloat16) { compare_all(Type::kBFloat16, Type::kInt8); }
TEST(the_last_one_runs_everywhere) { CHECK(vattn::kernels::kernels().back()->supported()); }
