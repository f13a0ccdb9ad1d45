// The attention of one item, written once for all instruction sets.
//
// Keys are taken in blocks of 128 tokens. Within a block, `lanes` keys at a time are transposed into a panel, in which
// a vector holds the same element of each; then a tile of query rows is multiplied with the panels, one element of a
// row against a vector of keys, so that scores need no sum across lanes. For a few rows, some kinds use keys and values
// as they lie (`Kind::Lanes`): laying them out would take longer than the products. The weights are multiplied with the
// values by the same product: as they lie, or as panels where a vector of a panel comes of several tokens and rows are
// many. All query heads of a KV head, and all new tokens, are rows of the product, so each key and value is read from
// memory once.
//
// `Isa` has vectors of floats and conversions, `Kind` the format of the operands: floats, pairs of bfloat16, or codes
// of eight bits. Everything is in an anonymous namespace: each instruction set has its own copy, compiled with its
// flags, and calls nothing that the linker could take from another.
#pragma once

#include <cstring>
#include <type_traits>

#include "attention.h"

namespace vattn::kernels {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;
// 2^x for x between -1/2 and 1/2: coefficients of a polynomial, the highest power first.
constexpr float kExp2[] = {
    1.54035304e-4f, 1.33335581e-3f, 9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1};
// tanh(x) = x * numerator(x^2) / denominator(x^2) up to kTanhEnd, where it is 1: coefficients likewise. Its relative
// error is 3e-7 everywhere, so that a large softcap costs no digits.
constexpr float kTanhNumerator[] = {1.31774041e-8f, 2.04810985e-5f, 3.4878056e-3f, 0.133744702f, 1};
constexpr float kTanhDenominator[] = {7.70399652e-7f, 3.27291142e-4f, 2.58473679e-2f, 0.467077851f, 1};
constexpr float kTanhEnd = 9.1f;
// Not more than any score, but finite, so that subtracting it never yields NaN.
constexpr float kLowest = -__FLT_MAX__;

constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
// The largest one that is not more than `x`, or 1.
constexpr int power_of_two(int x) { return x < 2 ? 1 : 1 << (31 - __builtin_clz(x)); }

template <Type kType>
float element(const std::byte* at) {
  if constexpr (kType == Type::kInt8) {
    return static_cast<float>(static_cast<std::int8_t>(*at));
  } else if constexpr (kType == Type::kFloat32) {
    float x;
    std::memcpy(&x, at, 4);
    return x;
  } else {
    std::uint16_t half;
    std::memcpy(&half, at, 2);
    std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
    if constexpr (kType == Type::kFloat16) {
      const std::uint32_t sign = bits & 0x80000000u, rest = half & 0x7fffu;
      if (rest >= 0x7c00u) {
        bits = sign | 0x7f800000u | (rest & 0x3ffu) << 13;
      } else if (rest >= 0x400u) {
        bits = sign | ((rest << 13) + 0x38000000u);
      } else {
        const float tiny = static_cast<float>(rest) * 0x1p-24f;
        return sign ? -tiny : tiny;
      }
    }
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  }
}

// Calls a function with a type of floats as its template argument. Loops over elements lie within: in a loop that reads
// either four or two bytes at an address, GCC takes both reads for as safe as one of them, and does both.
template <class Function>
auto with_type(Type type, const Function& function) {
  switch (type) {
    case Type::kFloat32:
      return function.template operator()<Type::kFloat32>();
    case Type::kBFloat16:
      return function.template operator()<Type::kBFloat16>();
    default:
      return function.template operator()<Type::kFloat16>();
  }
}

// Brings the line that will be needed next into the second cache: the first one has no room for it beside what is read
// meanwhile, and the hardware does not look further ahead than a few rows.
inline void fetch(const std::byte* at) { __builtin_prefetch(at, 0, 2); }
constexpr int kLine = 64;  // bytes

// A product whose sums are floats.
template <class Isa_>
struct PlainProduct {
  using Isa = Isa_;
  static constexpr int kMaxRows = Isa::kMaxRows;
  static constexpr int columns(int rows) { return Isa::columns(rows); }
  using Sum = typename Isa::F;
  static Sum start(const std::uint32_t*) { return Isa::zero(); }
  static Sum finish(Sum sum, float) { return sum; }
};

// Operands that are floats, whatever is stored.
template <class Isa_>
struct FloatOperands {
  using Isa = Isa_;
  using F = typename Isa::F;

  struct Product : PlainProduct<Isa> {
    static F step(F sum, const std::uint32_t* a, int, F b) {
      return Isa::fma(Isa::broadcast(reinterpret_cast<const float*>(a)), b, sum);
    }
  };
  using ForKeys = Product;
  using ForValues = Product;

  // Elements of a packed row of queries; and the distance between its two parts, where it has two.
  static int query_stride(int head_dim) { return head_dim; }
  static int query_gap(int) { return 0; }

  // These return the factor that the packed row is to be multiplied by.
  static float pack_query(const Attention& a, const std::byte* row, std::uint32_t* out) {
    with_type(a.query_type, [&]<Type kType>() {
      for (int i = 0; i < a.head_dim; i += Isa::kLanes) {
        const int count = smaller(Isa::kLanes, a.head_dim - i);
        Isa::store(reinterpret_cast<float*>(out) + i, Isa::template widen<kType>(row + i * size_of(kType), count),
                   count);
      }
    });
    return 1;
  }
  // 2^x, as exact as packed weights are.
  static F exp2(F x) { return Isa::exp2(x); }
  // `weight(i)` is asked once for each vector.
  template <class Weight>
  static float pack_weights(int vectors, const Weight& weight, std::uint32_t* out) {
    for (int i = 0; i < vectors; ++i)
      Isa::store(reinterpret_cast<float*>(out) + i * Isa::kLanes, weight(i), Isa::kLanes);
    return 1;
  }
};

// Of kinds whose keys are always laid out as panels.
struct NoLanes {
  static int count(int, int, bool) { return 0; }
  static int size(int, int) { return 0; }
  static void add(const std::uint32_t*, int, int, int, std::uint32_t*) {}
  template <class Rows>
  static void score(int, const Rows&, int, int, const std::uint32_t*, const float*, std::int64_t, bool, float*) {}
};

// Of a stored type.
template <class Isa, Type kStored>
struct Floats : FloatOperands<Isa> {
  using F = typename Isa::F;
  static constexpr int kElements = 1;     // of a row, in an element of a panel of keys
  static constexpr int kTokens = 1;       // in an element of a panel of values; one needs no panels
  static constexpr int kMultiple = 1;     // of tokens that values are weighed in; the last ones may be zeros
  static constexpr int kRowMultiple = 1;  // of rows of sums of a head, the last of which are nobody's
  static constexpr int kVectors = 1;      // of values, whose lanes are in an order of their own that `order` mends
  static constexpr int kVectorBytes = Isa::kLanes * size_of(kStored);  // of a row of values, for a vector
  // Of four lines that are fetched in their order, those that products fetch; the softmax fetches the others. 4 where
  // a step of a product reads less than two lines, 0 where lines are never fetched so.
  static constexpr int kOrdered = kVectorBytes == kLine ? 3 : Isa::kOrdered;
  using Lanes = NoLanes;
  static constexpr int kLaneRows = 0;     // most rows for which keys and values are used as they lie
  static constexpr int kFloatPanels = 0;  // fewest rows for which panels of pairs become floats once, or 0
  static constexpr bool kScaled = kStored == Type::kInt8;

  static F keys(const std::byte* row, int first, int count) {
    return Isa::template widen<kStored>(row + first * size_of(kStored), count);
  }
  // Vectors of the rows of `kTokens` tokens, of which `present` are there, which have `rest` elements from `first` on.
  static void values(const std::byte* const* rows, int, int first, int rest, F (&out)[kVectors]) {
    out[0] = keys(rows[0], first, smaller(Isa::kLanes, rest));
  }
  static void order(F (&)[kVectors]) {}
};

// Panels of two neighbours of bfloat16 per element, as they are stored.
template <class Isa_>
struct Neighbours {
  using Isa = Isa_;
  using F = typename Isa::F;
  static constexpr int kElements = 2;
  static constexpr int kOrdered = 0;
  static constexpr bool kScaled = false;
  static constexpr int kFloatPanels = 0;

  static F keys(const std::byte* row, int first, int count) { return Isa::dwords(row + 2 * first, count); }
  // Writes the first `count` of these numbers.
  static void round(std::byte* at, F x, int count) { Isa::template narrow<Type::kBFloat16>(at, x, count); }
};

// Rows of a block of keys that are one after another,
struct Contiguous {
  const std::byte* data;
  std::int64_t stride;
  const std::byte* operator[](int i) const { return data + i * stride; }
};

// or in blocks that a table names, which are listed.
struct Paged {
  const std::byte* const* rows;
  std::int64_t offset;
  const std::byte* operator[](int i) const { return rows[i] + offset; }
};

inline bool alike(const Rows& x, const Rows& y) {
  return x.slot_stride == y.slot_stride && x.token_stride == y.token_stride && x.head_stride == y.head_stride;
}

// How far the rows of one are from those of another.
inline std::int64_t distance(const Rows& from, const Rows& to) {
  return reinterpret_cast<std::intptr_t>(to.data) - reinterpret_cast<std::intptr_t>(from.data);
}

// Either of them.
class Place {
 public:
  Place() = default;
  Place(const Attention& a, const Rows& rows, int request, int head, int first, const std::byte** room) {
    const std::byte* data = rows.data + head * rows.head_stride;
    if (!a.table) {
      contiguous_ = {data + a.slot(request) * rows.slot_stride + first * rows.token_stride, rows.token_stride};
      return;
    }
    paged_ = {room, 0};
    const std::byte** end = room + kBlock;
    const std::int32_t* table = a.table + a.slot(request) * a.table_stride;
    int block = first / a.block_size, rest = first % a.block_size;
    for (int left = smaller(kBlock, a.lengths[request] - first); left > 0; ++block, rest = 0) {
      const std::byte* at = data + table[block] * rows.slot_stride;
      for (; left > 0 && rest < a.block_size; --left, ++rest) *room++ = at + rest * rows.token_stride;
    }
    while (room < end) *room++ = data;  // fetched perhaps, never read
  }

  // The same rows at a distance.
  Place operator+(std::int64_t offset) const {
    Place other = *this;
    if (paged_.rows)
      other.paged_.offset += offset;
    else
      other.contiguous_.data += offset;
    return other;
  }

  const std::byte* operator[](int i) const { return paged_.rows ? paged_[i] : contiguous_[i]; }

  template <class Rows>
  const Rows& as() const {
    if constexpr (std::is_same_v<Rows, Paged>)
      return paged_;
    else
      return contiguous_;
  }

  // Calls a function with the rows as what they are.
  template <class Function>
  void visit(const Function& function) const {
    if (paged_.rows)
      function(paged_);
    else
      function(contiguous_);
  }

 private:
  Contiguous contiguous_{};
  Paged paged_{};
};

// One of the tiles that rows are divided into.
struct Tile {
  int index, count;
};

// What a product of a tile reads: `each` of `columns` vectors from `first` on, in each of its steps.
struct Part {
  Tile tile;
  int first, columns, each, steps;
};

// Lines to fetch in the course of other work. A CPU has few lines on their way from memory at a time and waits when it
// is asked for more, so they are spread; in order, since the hardware's prefetcher follows them; and without a
// condition, which costs more than lines that nobody needs. Products fetch `kShare` of four, two or three,
template <int kShare>
struct Ahead {
  const std::byte* line;

  void one() {
    fetch(line);
    line += kLine;
  }
  // In step `k` of a product that reads `kBytes` in each.
  template <int kBytes>
  void step(int k) {
    constexpr int kLines = kBytes / kLine;
#pragma GCC unroll 4
    for (int i = 0; i < kLines / 2; ++i) {
      one();
      if (kShare == 3 && (k * (kLines / 2) + i) % 2) one();
    }
  }
  // Those of a product whose vectors are so many bytes.
  Ahead from(Part part, int bytes) const { return {line + part.first * part.steps * bytes / 4 * kShare}; }
};

// or all of them, one in every few steps, which are long enough to hide a condition. Each tile fetches its share; rows
// may have gaps, or be listed. Only what `from` returns can be stepped.
template <>
struct Ahead<4> {
  const Place* rows;
  int bytes;  // of a row; 0 where rows are gapless
  int row;
  const std::byte* line = nullptr;
  const std::byte* end = nullptr;
  int mask = 0;  // steps between two lines, a power of two, less one

  template <int>
  void step(int k) {
    if (k & mask) return;
    fetch(line);
    line += kLine;
    if (line != end) return;
    line = (*rows)[++row];
    end = line + bytes;
  }
  Ahead from(Part part, int vector_bytes) const {
    const int at = (part.tile.index * part.columns + part.first) * part.steps * vector_bytes / part.tile.count;
    Ahead next{rows, bytes, bytes ? row + at / bytes : row};
    next.line = (*rows)[next.row] + (bytes ? at % bytes / kLine * kLine : at);
    next.end = bytes ? (*rows)[next.row] + bytes : nullptr;
    next.mask = power_of_two(kLine * part.tile.count / (part.each * vector_bytes)) - 1;
    return next;
  }
};

// Where nothing is fetched.
struct Nothing {
  static void one() {}
  template <int>
  static void step(int) {}
};

// The right side of a product: vectors that were laid out one after another,
template <class Isa>
struct Panels {
  static constexpr int kTogether = 1;  // vectors
  static constexpr int kMaxRows = Isa::kMaxRows;
  static constexpr int kVectorBytes = 0;  // that are read from memory for a vector of a step
  const std::uint32_t* data;
  std::int64_t stride;

  // What a product is to fetch.
  static Nothing ahead(const Part&) { return {}; }
  template <int kColumns>
  void load(int first, int k, typename Isa::F (&b)[kColumns]) const {
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c)
      b[c] = Isa::load(reinterpret_cast<const float*>(data + (first + c) * stride + k * Isa::kLanes));
  }
};

// those of keys, during whose products values are fetched; as floats, pairs are twice as many vectors,
template <class Kind, bool kFloats>
struct KeyPanels : Panels<typename Kind::Isa> {
  static constexpr int kVectorBytes = Kind::kElements * Kind::kVectorBytes / (kFloats ? 2 : 1);
  Ahead<Kind::kOrdered> next;

  auto ahead(Part part) const { return next.from(part, kVectorBytes); }
};

// or values as they are stored, where they fill their vectors.
template <class Kind, class Rows, class Next>
struct Values {
  using Isa = typename Kind::Isa;
  static constexpr int kTogether = Kind::kVectors;
  static constexpr int kMaxRows = Isa::kMaxRowsInPlace;
  static constexpr int kVectorBytes = Kind::kVectorBytes * Kind::kTokens;
  const Rows& rows;
  int count;
  const std::byte* zeros;  // in place of what comes after the last row
  const Next& next;        // `Ahead`, or rows of which a line is fetched for each line that is read

  auto ahead(Part part) const {
    if constexpr (std::is_same_v<Next, Ahead<Kind::kOrdered>>)
      return next.from(part, kVectorBytes);
    else
      return Nothing{};
  }
  template <int kColumns>
  void load(int first, int k, typename Isa::F (&b)[kColumns]) const {
    const std::byte* row[Kind::kTokens];
#pragma GCC unroll 4
    for (int i = 0; i < Kind::kTokens; ++i) {
      const int token = k * Kind::kTokens + i;
      row[i] = i == 0 || token < count ? rows[token] : zeros;
    }
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; c += kTogether) {
      if constexpr (std::is_same_v<Next, Rows>)
#pragma GCC unroll 4
        for (int i = 0; i < Kind::kTokens; ++i)
          if (c * Kind::kVectorBytes % kLine == 0)
            fetch(next[k * Kind::kTokens + i] + (first + c) * Kind::kVectorBytes);
      typename Isa::F x[kTogether];
      Kind::values(row, Kind::kTokens, (first + c) * Isa::kLanes, kTogether * Isa::kLanes, x);
#pragma GCC unroll 4
      for (int i = 0; i < kTogether; ++i) b[c + i] = x[i];
    }
  }
};

template <class Product, int kRows, int kColumns, class Right>
void product(const std::uint32_t* a, int a_stride, int gap, const Right& right, int first, int columns, int steps,
             Tile tile, const float* factor, const float* rescale, float* out, std::int64_t out_stride) {
  using Isa = typename Product::Isa;
  using F = typename Isa::F;
  typename Product::Sum sums[kRows][kColumns];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) sums[r][c] = Product::start(a + r * a_stride);
  auto ahead = right.ahead({tile, first, columns, kColumns, steps});
  for (int k = 0; k < steps; ++k) {
    F b[kColumns];
    right.load(first, k, b);
    ahead.template step<kColumns * Right::kVectorBytes>(k);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) sums[r][c] = Product::step(sums[r][c], a + r * a_stride + k, gap, b[c]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) {
      float* at = out + r * out_stride + (first + c) * Isa::kLanes;
      F x = Product::finish(sums[r][c], factor[r]);
      if (rescale) x = Isa::fma(Isa::load(at), Isa::set(rescale[r]), x);
      Isa::store(at, x, Isa::kLanes);
    }
}

template <class Product, int kRows, class Right>
void product_of_rows(const std::uint32_t* a, int a_stride, int gap, const Right& right, int columns, int steps,
                     Tile tile, const float* factor, const float* rescale, float* out, std::int64_t out_stride) {
  constexpr int kColumns = Product::columns(kRows) / Right::kTogether * Right::kTogether;
  int c = 0;
  const auto go = [&]<int kCount>() {
    for (; c + kCount <= columns; c += kCount)
      product<Product, kRows, kCount>(a, a_stride, gap, right, c, columns, steps, tile, factor, rescale, out,
                                      out_stride);
  };
  go.template operator()<kColumns>();
  if constexpr (kColumns > 2 && Right::kTogether <= 2) go.template operator()<2>();
  if constexpr (Right::kTogether == 1) go.template operator()<1>();
}

// How many rows of sums fit beside what comes together.
template <class Product, class Right>
constexpr int most_rows() {
  int rows = smaller(Product::kMaxRows, Right::kMaxRows);
  while (Product::columns(rows) < Right::kTogether) --rows;
  return rows;
}

// out = rescale * out + factor * (a x right), for any number of rows; out = factor * (a x right) without rescale.
template <class Product, class Right>
  requires requires { Product::kTiles; }
void multiply(int rows, const std::uint32_t* a, int a_stride, int, const Right& right, int columns, int steps,
              const float*, const float* rescale, float* out, std::int64_t out_stride) {
  Product::multiply(rows, a, a_stride, right, columns, steps, rescale, out, out_stride);
}

template <class Product, class Right>
void multiply(int rows, const std::uint32_t* a, int a_stride, int gap, const Right& right, int columns, int steps,
              const float* factor, const float* rescale, float* out, std::int64_t out_stride) {
  // Tiles of nearly equal size: nine rows are five and four.
  constexpr int kMost = most_rows<Product, Right>();
  Tile tile{0, ceil_div(rows, kMost)};
  const int each = ceil_div(rows, tile.count);
  for (int r = 0; r < rows; r += each, ++tile.index) {
    const auto go = [&]<int kRows>() {
      product_of_rows<Product, kRows>(a + r * a_stride, a_stride, gap, right, columns, steps, tile, factor + r,
                                      rescale ? rescale + r : nullptr, out + r * out_stride, out_stride);
    };
    switch (smaller(each, rows - r)) {
      case 1:
        go.template operator()<1>();
        break;
      case 2:
        go.template operator()<2>();
        break;
      case 3:
        go.template operator()<3>();
        break;
      case 4:
        if constexpr (kMost >= 4) go.template operator()<4>();
        break;
      case 5:
        if constexpr (kMost >= 5) go.template operator()<5>();
        break;
      case 6:
        if constexpr (kMost >= 6) go.template operator()<6>();
        break;
      case 7:
        if constexpr (kMost >= 7) go.template operator()<7>();
        break;
      case 8:
        if constexpr (kMost >= 8) go.template operator()<8>();
        break;
    }
  }
}

// Transposes up to kLanes keys into a panel; the lanes after them repeat the last one. Of pairs, a panel of floats has
// the first elements, then the second ones, as queries do.
template <class Kind>
[[gnu::noinline]] void pack_keys(const Place& keys, int first, int count, int head_dim, const Place* next,
                                 [[maybe_unused]] bool floats, std::uint32_t* panel) {
  using Isa = typename Kind::Isa;
  constexpr int kLanes = Isa::kLanes;
  const std::byte* rows[kLanes];
  for (int i = 0; i < kLanes; ++i) rows[i] = keys[first + smaller(i, count - 1)];
  const int steps = head_dim / Kind::kElements;
  constexpr int kBytes = Kind::kElements * Kind::kVectorBytes / kLanes;  // of a step
  for (int k = 0; k < steps; k += kLanes) {
    typename Isa::F x[kLanes];
    const int rest = smaller(kLanes, steps - k);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) x[i] = Kind::keys(rows[i], k * Kind::kElements, rest);
    if (next)
      for (int i = 0; i < count; ++i) fetch((*next)[first + i] + k * kBytes);
    Isa::transpose(x);
    float* out = reinterpret_cast<float*>(panel) + k * kLanes;
    if constexpr (Kind::kFloatPanels != 0)
      if (floats) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i)
          if (i < rest) {
            Isa::store(out + i * kLanes, Isa::even(x[i]), kLanes);
            Isa::store(out + (steps + i) * kLanes, Isa::odd(x[i]), kLanes);
          }
        continue;
      }
    if (rest == kLanes) {
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) Isa::store(out + i * kLanes, x[i], kLanes);
    } else {
      for (int i = 0; i < rest; ++i) Isa::store(out + i * kLanes, x[i], kLanes);
    }
  }
}

// Lays out the elements from `from` on of values. `kVectors` vectors come of the rows of `kTokens` tokens. Zeros follow
// the last of `count` tokens, up to `padded` ones.
template <class Kind>
void pack_values(const Place& values, int count, int padded, int from, int v_head_dim, const Place& next,
                 std::uint32_t* panels) {
  using Isa = typename Kind::Isa;
  constexpr int kLanes = Isa::kLanes;
  for (int token = 0; token < padded; token += Kind::kTokens) {
    const std::byte* rows[Kind::kTokens];
    const int present = smaller(Kind::kTokens, count - token);
    float* out = reinterpret_cast<float*>(panels) + token / Kind::kTokens * kLanes;
    if (Kind::kMultiple > Kind::kTokens && present <= 0) {
      for (int d = from; d < v_head_dim; d += kLanes * Kind::kVectors, out += kBlock * kLanes * Kind::kVectors)
        for (int i = 0; i < Kind::kVectors; ++i) Isa::store(out + i * kBlock * kLanes, Isa::zero(), kLanes);
      continue;
    }
    for (int i = 0; i < Kind::kTokens; ++i) rows[i] = values[token + smaller(i, present - 1)];
    for (int d = from; d < v_head_dim; d += kLanes * Kind::kVectors, out += kBlock * kLanes * Kind::kVectors) {
      typename Isa::F x[Kind::kVectors];
      for (int i = 0; i < present; ++i) fetch(next[token + i] + d / kLanes * Kind::kVectorBytes);
      Kind::values(rows, present, d, v_head_dim - d, x);
#pragma GCC unroll 4
      for (int i = 0; i < Kind::kVectors; ++i) Isa::store(out + i * kBlock * kLanes, x[i], kLanes);
    }
  }
}

template <class Isa>
struct Softmax {
  using F = typename Isa::F;
  static constexpr int kLanes = Isa::kLanes;

  static F polynomial(const float (&coefficients)[5], F x) {
    F y = Isa::set(coefficients[0]);
#pragma GCC unroll 4
    for (int i = 1; i < 5; ++i) y = Isa::fma(y, x, Isa::set(coefficients[i]));
    return y;
  }

  static F tanh(F x) {
    x = Isa::max(Isa::set(-kTanhEnd), Isa::min(Isa::set(kTanhEnd), x));  // in this order NaN stays NaN
    const F square = Isa::mul(x, x);
    return Isa::div(Isa::mul(x, polynomial(kTanhNumerator, square)), polynomial(kTanhDenominator, square));
  }

  // Whether scores only have to be scaled, which the largest of them survives; and by enough that a sink can be divided
  // by it.
  static bool is_direct(const Attention& a) { return a.softcap == 0 && a.scale > 1e-6f; }

  // A score times this is a logit to base 2. It is finite, so that a difference of 0 stays 0.
  static float factor(const Attention& a) {
    const float factor = is_direct(a) ? a.scale * kLog2E : kLog2E;
    return factor < -kLowest ? factor : -kLowest;
  }

  // A sink as a score.
  static float sink(const Attention& a, int head) {
    const float score = is_direct(a) ? a.sinks[head] / a.scale : a.sinks[head];
    return score > kLowest ? (score < -kLowest ? score : -kLowest) : kLowest;
  }

  // Scores are hidden outside of [first, last), scaled where keys have scales, and capped. Returns the largest of each
  // lane.
  template <class Fetching>
  static F limit(const Attention& a, float* scores, const float* scales, int vectors, int first, int last,
                 Fetching& ahead) {
    const bool direct = is_direct(a);
    F most = Isa::set(kLowest);
    const int plain = direct && !scales && first <= 0 ? larger(0, smaller(vectors, last / kLanes)) : 0;
    for (int i = 0; i < plain; ++i) {
      ahead.one();
      most = Isa::max(most, Isa::load(scores + i * kLanes));
    }
    const float inverse = 1 / a.softcap;
    const F scale = Isa::set(a.scale), cap = Isa::set(a.softcap);
    const F of_cap = Isa::set(inverse < -kLowest ? inverse : -kLowest);
    for (int i = plain; i < vectors; ++i) {
      ahead.one();
      F x = Isa::load(scores + i * kLanes);
      const bool hidden = i * kLanes < first || (i + 1) * kLanes > last;
      if (scales) x = Isa::mul(x, Isa::load(scales + i * kLanes));
      if (!direct) x = Isa::mul(x, scale);
      if (a.softcap > 0) x = Isa::mul(tanh(Isa::mul(x, of_cap)), cap);
      if (hidden) x = Isa::hide(x, first - i * kLanes, last - i * kLanes);
      if (scales || hidden || !direct) Isa::store(scores + i * kLanes, x, kLanes);
      most = Isa::max(most, x);
    }
    return most;
  }

  // Of each of the first `count` rows the largest lane, in the row's lane. NaN may be left out.
  static F largest(F (&rows)[kLanes], int count) {
    if (count == 1) return Isa::set(Isa::largest(rows[0]));
    for (int i = count; i < kLanes; ++i) rows[i] = Isa::set(kLowest);
    Isa::transpose(rows);
#pragma GCC unroll 16
    for (int i = 1; i < kLanes; ++i) rows[0] = Isa::max(rows[0], rows[i]);
    return rows[0];
  }

  // How far a score lies below the maximum, to base 2. The difference comes first: of products, whose roundings grow
  // with the scores, the largest would not be the maximum.
  static F below(F score, F maximum, float factor) { return Isa::mul(Isa::sub(score, maximum), Isa::set(factor)); }

  // The share that is left of what was weighed with an earlier maximum.
  static F rescale(F earlier, F maximum, float factor) { return Isa::exp2(below(earlier, maximum, factor)); }

  // Packs the weights of limited scores, times the values' scales if there are any. Returns the factor of the packed
  // row, and adds the weights to the rescaled lanes of `total`.
  template <class Kind, class Fetching>
  static float weights(const float* scores, const float* scales, int vectors, float factor, float maximum,
                       float rescale, std::uint32_t* out, float* total, Fetching& ahead) {
    F sum = Isa::zero();
    const auto weight = [&](int i) {
      ahead.one();
      const F x = Kind::exp2(below(Isa::load(scores + i * kLanes), Isa::set(maximum), factor));
      sum = Isa::add(sum, x);
      return scales ? Isa::mul(x, Isa::load(scales + i * kLanes)) : x;
    };
    const float packed = Kind::pack_weights(vectors, weight, out);
    Isa::store(total, Isa::fma(Isa::load(total), Isa::set(rescale), sum), kLanes);
    return packed;
  }
};

// The scales of a block's rows, then zeros up to `padded`. A row that was not finite has a scale that is not; NaN then
// shows it in whatever is computed with the row, and likewise a scale below 0, which no kernel of codes can use.
template <class Isa>
void read_scales(Type type, const Place& rows, int count, int padded, float* out) {
  with_type(type, [&]<Type kType>() {
    rows.visit([&]<class Rows>(const Rows& places) {
      if constexpr (std::is_same_v<Rows, Contiguous>)
        if (places.stride == size_of(kType)) {
          for (int i = 0; i < count; i += Isa::kLanes)
            Isa::store(out + i, Isa::template widen<kType>(places[i], smaller(Isa::kLanes, count - i)), Isa::kLanes);
          return;
        }
      for (int i = 0; i < count; ++i) out[i] = element<kType>(places[i]);
    });
  });
  for (int i = 0; i < count; ++i) out[i] = out[i] < 0 ? __builtin_nanf("") : out[i] + 0 * out[i];
  for (int i = count; i < padded; ++i) out[i] = 0;
}

template <class Isa>
void write_row(const Attention& a, const float* sums, float total, std::byte* output) {
  const auto inverse = Isa::set(1 / total);
  with_type(a.query_type, [&]<Type kType>() {
    for (int i = 0; i < a.v_head_dim; i += Isa::kLanes)
      Isa::template narrow<kType>(output + i * size_of(kType), Isa::mul(Isa::load(sums + i), inverse),
                                  smaller(Isa::kLanes, a.v_head_dim - i));
  });
}

// Computes an item, and returns the one to go on with. It is taken when the last block begins, so that its first keys
// can be fetched meanwhile.
template <class Kind>
const Item* attend_item(const Attention& a, const Item& item, Queue& queue, const Scratch& s) {
  using Isa = typename Kind::Isa;
  constexpr int kLanes = Isa::kLanes;
  const int group = a.group();
  const int rows = item.num_tokens * group;  // of a head
  const int all = rows * item.num_heads;
  const int stride = Kind::query_stride(a.head_dim);
  const int vectors = ceil_div(a.v_head_dim, kLanes * Kind::kVectors) * Kind::kVectors;
  const std::int64_t width = sum_stride(a);
  const float factor = Softmax<Isa>::factor(a);
  const int request = item.request;
  const int first_row = (a.starts ? a.starts[request] : request) + item.token;
  const int num_new = a.num_new(request);
  const int position = a.lengths[request] - num_new + item.token;  // of the item's first query
  const int first_visible = a.window ? larger(0, position - a.window + 1) : 0;

  for (int h = 0, r = 0; h < item.num_heads; ++h)
    for (int t = 0; t < item.num_tokens; ++t)
      for (int g = 0; g < group; ++g, ++r) {
        const int head = (item.head + h) * group + g;
        const std::byte* query = a.query + (first_row + t) * a.query_token_stride + head * a.query_head_stride;
        s.factor[r] = Kind::pack_query(a, query, s.queries + r * static_cast<std::int64_t>(stride));
        const bool sink = a.sinks && item.begin == first_visible && a.sinks[head] != -__builtin_inff();
        s.maximum[r] = sink ? Softmax<Isa>::sink(a, head) : kLowest;
        std::memset(s.total + r * kLanes, 0, sizeof(float) * kLanes);
        if (sink) s.total[r * kLanes] = 1 + 0 * a.sinks[head];  // NaN if it is not finite
      }
  const int bytes = a.head_dim * static_cast<int>(size_of(a.stored_type));
  const bool gapless = !a.table && a.key.token_stride == bytes && a.value.token_stride == bytes;
  const int lanes = Kind::Lanes::count(rows, a.head_dim, gapless), lane_size = Kind::Lanes::size(lanes, a.head_dim);
  if (lanes) {
    std::memset(s.lanes, 0, sizeof(*s.lanes) * item.num_heads * lane_size);
    for (int r = 0; r < all; ++r)
      Kind::Lanes::add(s.queries + r * static_cast<std::int64_t>(stride), r % rows, lanes, a.head_dim,
                       s.lanes + r / rows * lane_size);
  }
  const bool floats = Kind::kFloatPanels && rows >= Kind::kFloatPanels;
  // Whether lines are fetched in their order, by the products and the softmax: where it is memory that is waited for.
  // Where the softmax has a share and rows are few, laying out keys, which has none, takes most of the time.
  constexpr bool kInOrder = Kind::kOrdered != 0, kByProducts = Kind::kOrdered == 4;
  constexpr int kRest = 4 - Kind::kOrdered;
  const bool in_order = kInOrder && (kByProducts ? rows <= 32 : gapless && !lanes && rows >= 4 && rows <= 8) &&
                        a.head_dim == a.v_head_dim && a.head_dim % (4 * kLanes) == 0 && bytes % kLine == 0;
  const auto lines = [&](const Place& place, int row) {
    if constexpr (kByProducts)
      return Ahead<4>{&place, gapless ? 0 : bytes, row};
    else
      return Ahead<Kind::kOrdered>{place[row]};
  };
  const std::byte* zeros = reinterpret_cast<const std::byte*>(s.zeros);
  std::memset(s.zeros, 0, sizeof(float) * width);
  const int sum_rows = ceil_div(rows, Kind::kRowMultiple) * Kind::kRowMultiple;
  std::memset(s.sums, 0, sizeof(float) * item.num_heads * sum_rows * width);

  // Where keys and values are laid out alike, the values are the keys' rows at a distance.
  const bool together = alike(a.key, a.value), scales_together = alike(a.key_scale, a.value_scale);
  Place next_keys(a, a.key, request, item.head, item.begin, s.places);
  const Item* next = nullptr;
  int room = 0;
  for (std::int64_t at = item.begin; at < item.end; at += kBlock) {  // a length may be the largest number of 32 bits
    const int begin = static_cast<int>(at), count = smaller(kBlock, item.end - begin);
    const int padded = ceil_div(count, Kind::kMultiple) * Kind::kMultiple;
    const int full = ceil_div(padded, kLanes);
    const Place first_keys = next_keys;
    const std::byte** next_room = s.places + (room ^= kBlock);
    if (count < item.end - begin) {
      next_keys = Place(a, a.key, request, item.head, begin + kBlock, next_room);
    } else if ((next = queue.take())) {
      next_keys = Place(a, a.key, next->request, next->head, next->begin, next_room);
      // As many rows as this block has are fetched along with the values; here, those after them.
      for (int i = count; i < smaller(kBlock, next->end - next->begin); ++i)
        for (int d = 0; d < a.head_dim * size_of(a.stored_type); d += kLine) fetch(next_keys[i] + d);
    }
    const Place first_values = together ? first_keys + distance(a.key, a.value)
                                        : Place(a, a.value, request, item.head, begin, s.places + 2 * kBlock);
    Place first_key_scales, first_value_scales;
    if constexpr (Kind::kScaled) {
      first_key_scales = Place(a, a.key_scale, request, item.head, begin, s.places + 3 * kBlock);
      first_value_scales = scales_together ? first_key_scales + distance(a.key_scale, a.value_scale)
                                           : Place(a, a.value_scale, request, item.head, begin, s.places + 4 * kBlock);
    }
    for (int h = 0; h < item.num_heads; ++h) {
      const Place keys = first_keys + h * a.key.head_stride, values = first_values + h * a.value.head_stride;
      if constexpr (Kind::kScaled) {
        read_scales<Isa>(a.scale_type, first_key_scales + h * a.key_scale.head_stride, count, full * kLanes, s.scales);
        read_scales<Isa>(a.scale_type, first_value_scales + h * a.value_scale.head_stride, count, full * kLanes,
                         s.scales + kBlock);
      }
      // The keys that come next are those of the next head, or else of the next block.
      const Place after = h + 1 < item.num_heads ? keys + a.key.head_stride : next_keys;
      const float* key_scales = Kind::kScaled ? s.scales : nullptr;
      const float* value_scales = Kind::kScaled ? s.scales + kBlock : nullptr;

      if (lanes)
        keys.visit([&](const auto& places) {
          Kind::Lanes::score(lanes, places, count, a.head_dim, s.lanes + h * lane_size, s.factor + h * rows,
                             together ? distance(a.key, a.value) : 0, in_order && gapless, s.scores);
        });
      const std::uint32_t* queries = s.queries + h * rows * static_cast<std::int64_t>(stride);
      const int steps = a.head_dim / Kind::kElements;
      const std::int64_t panel = (floats ? a.head_dim : steps) * kLanes;
      for (int i = lanes ? count : 0; i < count; i += kPanels * kLanes) {
        const int panels = ceil_div(smaller(kPanels * kLanes, count - i), kLanes);
        for (int p = 0; p < panels; ++p) {
          const int first = i + p * kLanes;
          pack_keys<Kind>(keys, first, smaller(kLanes, count - first), a.head_dim, in_order ? nullptr : &values, floats,
                          s.keys + p * panel);
        }
        const auto score = [&]<class Product>(int products, int gap) {
          const auto go = [&](const auto& right) {
            multiply<Product>(rows, queries, stride, gap, right, panels, products, s.factor + h * rows, nullptr,
                              s.scores + i, kBlock);
          };
          const Panels<Isa> laid_out{s.keys, panel};
          constexpr bool kFloats = !std::is_same_v<Product, typename Kind::ForKeys>;
          if constexpr (kInOrder)
            if (in_order) return go(KeyPanels<Kind, kFloats>{laid_out, lines(values, i / 4 * Kind::kOrdered)});
          go(laid_out);
        };
        if (!floats)
          score.template operator()<typename Kind::ForKeys>(steps, Kind::query_gap(a.head_dim));
        else if constexpr (Kind::kFloatPanels != 0)
          score.template operator()<typename FloatOperands<Isa>::Product>(a.head_dim, 0);
      }

      const auto fetching = [&](const Place& place, int row, const auto& function) {
        if constexpr (kInOrder && !kByProducts)
          if (in_order) return function(lines(place, row));
        function(Nothing{});
      };
      float* maximum = s.maximum + h * rows;
      float* total = s.total + h * rows * kLanes;
      const auto limit = [&](auto ahead) {
        int last = position, queries_left = group;  // the query's own key; and those of its token
        for (int r = 0; r < rows; r += kLanes) {
          typename Isa::F most[kLanes];
          const int here = smaller(kLanes, rows - r);
          for (int i = 0; i < here; ++i) {
            const int first = a.window ? larger(0, last - a.window + 1) : 0;
            most[i] = Softmax<Isa>::limit(a, s.scores + (r + i) * kBlock, key_scales, full, first - begin,
                                          smaller(count, last + 1 - begin), ahead);
            if (--queries_left == 0) queries_left = group, ++last;
          }
          const auto earlier = Isa::load_some(maximum + r, here);
          const auto now = Isa::max(Softmax<Isa>::largest(most, here), earlier);  // the second one where one is NaN
          Isa::store(maximum + r, now, here);
          Isa::store(s.rescale + r, Softmax<Isa>::rescale(earlier, now, factor), kLanes);
        }
      };
      fetching(values, full * kLanes / 4 * Kind::kOrdered, limit);
      const auto weights = [&](auto ahead) {
        for (int r = 0; r < rows; ++r)
          s.packed[r] =
              Softmax<Isa>::template weights<Kind>(s.scores + r * kBlock, value_scales, full, factor, maximum[r],
                                                   s.rescale[r], s.weights + r * kBlock, total + r * kLanes, ahead);
      };
      fetching(after, 0, weights);

      const auto weigh = [&](const auto& right, int first, int columns) {
        multiply<typename Kind::ForValues>(rows, s.weights, kBlock, 0, right, columns, padded / Kind::kTokens, s.packed,
                                           s.rescale, s.sums + h * sum_rows * width + first * kLanes, width);
      };
      int whole = 0;
      if constexpr (Kind::kTokens == 1 || Kind::kLaneRows)
        if (Kind::kTokens == 1 || rows <= Kind::kLaneRows) {
          whole = a.v_head_dim / (kLanes * Kind::kVectors) * Kind::kVectors;
          values.visit([&]<class Rows>(const Rows& places) {
            if constexpr (kInOrder)
              if (in_order)
                return weigh(
                    Values<Kind, Rows, Ahead<Kind::kOrdered>>{places, count, zeros, lines(after, count / 4 * kRest)}, 0,
                    whole);
            weigh(Values<Kind, Rows, Rows>{places, count, zeros, after.as<Rows>()}, 0, whole);
          });
        }
      if (whole < vectors) {
        pack_values<Kind>(values, count, padded, whole * kLanes, a.v_head_dim, after, s.values);
        weigh(Panels<Isa>{s.values, kBlock * kLanes}, whole, vectors - whole);
      }
    }
  }

  for (int h = 0, r = 0; h < item.num_heads; ++h)
    for (int t = 0; t < item.num_tokens; ++t)
      for (int g = 0; g < group; ++g, ++r) {
        float* sums = s.sums + (h * sum_rows + t * group + g) * width;
        for (int d = 0; Kind::kVectors > 1 && d < vectors * kLanes; d += kLanes * Kind::kVectors) {
          typename Isa::F x[Kind::kVectors];
          for (int i = 0; i < Kind::kVectors; ++i) x[i] = Isa::load(sums + d + i * kLanes);
          Kind::order(x);
          for (int i = 0; i < Kind::kVectors; ++i) Isa::store(sums + d + i * kLanes, x[i], kLanes);
        }
        const std::int64_t row = static_cast<std::int64_t>(first_row + t) * a.num_heads + (item.head + h) * group + g;
        const float total = Isa::sum(Isa::load(s.total + r * kLanes));
        if (item.partial < 0) {
          write_row<Isa>(a, sums, total, a.output + row * a.v_head_dim * size_of(a.query_type));
        } else {
          float* partial = s.partials + item.partial + r * (width + 2);
          partial[0] = s.maximum[r];
          partial[1] = total;
          std::memcpy(partial + 2, sums, sizeof(float) * width);
        }
      }
  return next;
}

template <class Kind>
void attend_items(const Attention& a, Queue& queue, const Scratch& s) {
  for (const Item* item = queue.take(); item;) item = attend_item<Kind>(a, *item, queue, s);
}

template <class Isa>
void merge_rows(const Attention& a, const float* partial, int count, std::int64_t stride, std::byte* output) {
  using F = typename Isa::F;
  float most = partial[0];
  for (int i = 1; i < count; ++i) most = partial[i * stride] > most ? partial[i * stride] : most;
  const float factor = Softmax<Isa>::factor(a);
  const auto share = [&](int i) {
    return Softmax<Isa>::rescale(Isa::set(partial[i * stride]), Isa::set(most), factor);
  };
  float total = 0;
  for (int i = 0; i < count; ++i) total += Isa::first(share(i)) * partial[i * stride + 1];
  const F inverse = Isa::set(1 / total);
  with_type(a.query_type, [&]<Type kType>() {
    for (int d = 0; d < a.v_head_dim; d += Isa::kLanes) {
      F sum = Isa::zero();
      for (int i = 0; i < count; ++i) sum = Isa::fma(share(i), Isa::load(partial + i * stride + 2 + d), sum);
      Isa::template narrow<kType>(output + d * size_of(kType), Isa::mul(sum, inverse),
                                  smaller(Isa::kLanes, a.v_head_dim - d));
    }
  });
}

}  // namespace
}  // namespace vattn::kernels
