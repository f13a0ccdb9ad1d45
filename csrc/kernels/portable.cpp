// Plain C++ over arrays of four floats, which compilers turn into whatever vectors the machine has.
#include "layer_rows.h"
#include "roofline_loops.h"
#include "tile.h"

namespace vattn::kernels {
namespace {

struct Portable {
  static constexpr int kLanes = 4;
  struct F {
    float x[kLanes];
  };
  static constexpr int kMaxRows = 4, kMaxRowsInPlace = 4;
  static constexpr int kOrdered = 0;  // of vectors that are less than a line; see `Floats`
  static constexpr int columns(int rows) { return rows <= 2 ? 4 : 2; }

  template <class Function>
  static F each(Function function) {
    F y;
#pragma GCC unroll 4
    for (int i = 0; i < kLanes; ++i) y.x[i] = function(i);
    return y;
  }

  static F zero() { return set(0); }
  static F set(float x) {
    return each([&](int) { return x; });
  }
  static F load(const float* at) {
    return each([&](int i) { return at[i]; });
  }
  static F load_some(const float* at, int count) {
    return each([&](int i) { return i < count ? at[i] : 0; });
  }
  static F broadcast(const float* at) { return set(*at); }
  static void store(float* at, F x, int count) {
    for (int i = 0; i < smaller(kLanes, count); ++i) at[i] = x.x[i];
  }
  static F add(F x, F y) {
    return each([&](int i) { return x.x[i] + y.x[i]; });
  }
  static F sub(F x, F y) {
    return each([&](int i) { return x.x[i] - y.x[i]; });
  }
  static F mul(F x, F y) {
    return each([&](int i) { return x.x[i] * y.x[i]; });
  }
  static F div(F x, F y) {
    return each([&](int i) { return x.x[i] / y.x[i]; });
  }
  static F fma(F x, F y, F z) {
    return each([&](int i) { return x.x[i] * y.x[i] + z.x[i]; });
  }
  static F min(F x, F y) {
    return each([&](int i) { return x.x[i] < y.x[i] ? x.x[i] : y.x[i]; });
  }
  static F max(F x, F y) {
    return each([&](int i) { return x.x[i] > y.x[i] ? x.x[i] : y.x[i]; });
  }
  static float sum(F x) { return (x.x[0] + x.x[1]) + (x.x[2] + x.x[3]); }
  static float largest(F x) {
    float most = x.x[0];
    for (int i = 1; i < kLanes; ++i) most = x.x[i] > most ? x.x[i] : most;
    return most;
  }
  static float first(F x) { return x.x[0]; }
  static F hide(F x, int first, int last) {
    return each([&](int i) { return first <= i && i < last ? x.x[i] : -__builtin_inff(); });
  }

  static F exp2(F x) {
    return each([&](int i) {
      float z = x.x[i];
      if (z < -126) return 0.0f;
      // 2^128 is infinite.
      if (z > 128) z = 128;
      const float whole = z + 12582912.0f - 12582912.0f;  // 1.5 * 2^23 rounds to the nearest integer
      const float rest = z - whole;
      float y = kExp2[0];
#pragma GCC unroll 8
      for (int k = 1; k < 7; ++k) y = y * rest + kExp2[k];
      if (z != z) return z;
      const std::uint32_t bits = static_cast<std::uint32_t>(static_cast<int>(whole) + 127) << 23;
      float power;
      std::memcpy(&power, &bits, 4);
      return y * power;
    });
  }

  template <Type kType>
  static F widen(const std::byte* at, int count) {
    return each([&](int i) { return i < count ? element<kType>(at + i * size_of(kType)) : 0.0f; });
  }

  template <Type kType>
  static void narrow(std::byte* at, F x, int count) {
    for (int i = 0; i < count; ++i) {
      if constexpr (kType == Type::kFloat32) {
        std::memcpy(at + 4 * i, &x.x[i], 4);
      } else {
        const std::uint16_t bits = kType == Type::kBFloat16 ? bfloat16(x.x[i]) : float16(x.x[i]);
        std::memcpy(at + 2 * i, &bits, 2);
      }
    }
  }

  static std::uint16_t bfloat16(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return static_cast<std::uint16_t>((bits | 0x00400000u) >> 16);
    return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }

  static std::uint16_t float16(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const std::uint32_t sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
    if (rest >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // rounds past the largest
    std::uint32_t half;
    if (rest < 0x38800000u) {
      // Adding 0.5 aligns the last bit of a subnormal with the last of the sum, which rounds it.
      float magnitude;
      std::memcpy(&magnitude, &rest, 4);
      magnitude += 0.5f;
      std::memcpy(&half, &magnitude, 4);
      half -= 0x3f000000u;
    } else {
      half = (rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13;
    }
    return static_cast<std::uint16_t>(sign | half);
  }

  static void transpose(F (&x)[kLanes]) {
    for (int i = 0; i < kLanes; ++i)
      for (int j = 0; j < i; ++j) {
        const float y = x[i].x[j];
        x[i].x[j] = x[j].x[i];
        x[j].x[i] = y;
      }
  }
};

bool supported() { return true; }

}  // namespace

extern const Kernels portable_kernels;
constinit const Kernels portable_kernels{
    .name = "portable",
    .needs = "nothing",
    .base = nullptr,
    .lanes = Portable::kLanes,
    .supported = supported,
    .worthwhile = nullptr,
    .panels_are_faster = nullptr,
    .linear_layers = false,
    .attend = {attend_items<Floats<Portable, Type::kFloat32>>, attend_items<Floats<Portable, Type::kBFloat16>>,
               attend_items<Floats<Portable, Type::kFloat16>>, attend_items<Floats<Portable, Type::kInt8>>},
    .merge = merge_rows<Portable>,
    .norm = layer_row<Portable, Norm>,
    .rotation = layer_row<Portable, Rotation>,
    .gate = layer_row<Portable, Gate>,
    .linear_row = nullptr,
    .linear = nullptr,
    .products = {product_loop<Floats<Portable, Type::kFloat32>>, product_loop<Floats<Portable, Type::kBFloat16>>,
                 product_loop<Floats<Portable, Type::kFloat16>>, product_loop<Floats<Portable, Type::kInt8>>},
    .read = read_loop<Portable>};

}  // namespace vattn::kernels
