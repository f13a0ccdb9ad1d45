// AMX: products of tiles of bfloat16, sixteen rows by sixteen columns at a time.
#include <sys/syscall.h>
#include <unistd.h>

#include "avx512.h"
#include "roofline_loops.h"
#include "widened.h"

namespace vattn::kernels {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileSteps = 16;  // pairs of a row, which fill a line

// What a thread's tiles are: all eight are whole. What they were is put back, since oneDNN, which uses them too, need
// not ask before each of its products.
class Tiles {
 public:
  Tiles() {
    asm volatile("sttilecfg %0" : "=m"(before_));
    Config config{};
    config.palette = 1;
    for (int i = 0; i < 8; ++i) {
      config.bytes[i] = 4 * kTileSteps;
      config.rows[i] = kTileRows;
    }
    load(config);
  }
  ~Tiles() {
    if (before_.palette)
      load(before_);
    else
      _tile_release();
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

 private:
  struct Config {
    std::uint8_t palette, start_row, reserved[14];
    std::uint16_t bytes[16];
    std::uint8_t rows[16];
  };
  static_assert(sizeof(Config) == 64);
  // The intrinsic tells GCC 12 of the first eight bytes only, so that it leaves out what writes the others.
  static void load(const Config& config) { asm volatile("ldtilecfg %0" : : "m"(config)); }

  Config before_;
};

// Panels of pairs are tiles as they are laid out. Where rows do not fill the last tile, it has whatever comes after
// them, and so has the output.
struct TileProduct {
  static constexpr bool kTiles = true;
  using Isa = Avx512;

  static void multiply(int rows, const std::uint32_t* a, int a_stride, const Panels<Isa>& b, int columns, int steps,
                       const float* rescale, float* out, std::int64_t out_stride) {
    for (int r = 0; rescale && r < rows; ++r)
      if (rescale[r] != 1)  // seldom, once the maximum has been met
        for (int c = 0; c < columns; ++c) {
          float* const at = out + r * out_stride + c * Isa::kLanes;
          Isa::store(at, Isa::mul(Isa::load(at), Isa::set(rescale[r])), Isa::kLanes);
        }
    // GCC 12 does not know that loads of tiles read memory, and could move what writes it behind them.
    asm volatile("" : : : "memory");
    for (int r = 0; r < rows; r += 2 * kTileRows)
      for (int c = 0; c < columns; c += 2)
        square(rows - r > kTileRows, columns - c > 1, a + r * a_stride, a_stride, b.data + c * b.stride, b.stride,
               steps, rescale != nullptr, out + r * out_stride + c * Isa::kLanes, out_stride);
  }

 private:
  // A tile of rows by one of columns, with those that lie below and beside: each that is loaded is multiplied twice.
  static void square(bool below, bool beside, const std::uint32_t* a, int a_stride, const std::uint32_t* b,
                     std::int64_t b_stride, int steps, bool add, float* out, std::int64_t out_stride) {
    const std::int64_t a_bytes = 4 * static_cast<std::int64_t>(a_stride), out_bytes = 4 * out_stride;
    constexpr int kPanelBytes = 4 * Isa::kLanes;
    float* const lower = out + kTileRows * out_stride;
    if (add) {
      _tile_loadd(0, out, out_bytes);
      if (beside) _tile_loadd(1, out + Isa::kLanes, out_bytes);
      if (below) _tile_loadd(2, lower, out_bytes);
      if (below && beside) _tile_loadd(3, lower + Isa::kLanes, out_bytes);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int k = 0; k < steps; k += kTileSteps) {
      _tile_loadd(4, a + k, a_bytes);
      _tile_loadd(6, b + k * Isa::kLanes, kPanelBytes);
      _tile_dpbf16ps(0, 4, 6);
      if (beside) {
        _tile_loadd(7, b + b_stride + k * Isa::kLanes, kPanelBytes);
        _tile_dpbf16ps(1, 4, 7);
      }
      if (below) {
        _tile_loadd(5, a + kTileRows * a_stride + k, a_bytes);
        _tile_dpbf16ps(2, 5, 6);
        if (beside) _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, out, out_bytes);
    if (beside) _tile_stored(1, out + Isa::kLanes, out_bytes);
    if (below) _tile_stored(2, lower, out_bytes);
    if (below && beside) _tile_stored(3, lower + Isa::kLanes, out_bytes);
  }
};

// Pairs in tiles.
struct Tiled : Neighbours<Avx512>, TokenPairs {
  using F = Avx512::F;
  static constexpr int kVectorBytes = 32;
  static constexpr int kMultiple = 2 * kTileSteps;
  static constexpr int kRowMultiple = kTileRows;
  using ForKeys = TileProduct;
  using ForValues = TileProduct;
  using Lanes = NoLanes;
  static constexpr int kLaneRows = 0;

  static void values(const std::byte* const* rows, int present, int first, int rest, F (&out)[2]) {
    const __m512i even = _mm512_castps_si512(Isa::dwords(rows[0] + 2 * first, rest / 2));
    const __m512i odd = _mm512_castps_si512(Isa::dwords(rows[1] + 2 * first, present == 2 ? rest / 2 : 0));
    unpack(even, odd, out);
  }

  static int query_stride(int head_dim) { return head_dim / 2; }
  static int query_gap(int) { return 0; }
  static float pack_query(const Attention& a, const std::byte* row, std::uint32_t* out) {
    std::memcpy(out, row, static_cast<std::size_t>(a.head_dim) * 2);
    return 1;
  }
  template <class Weight>
  static float pack_weights(int vectors, const Weight& weight, std::uint32_t* out) {
    for (int i = 0; i < vectors; ++i)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out) + i, (__m256i)_mm512_cvtneps_pbh(weight(i)));
    return 1;
  }
};

// Fewer rows would leave the tiles mostly empty.
constexpr int kFewRows = 6;

// Heads that do not end with a tile, and few rows, are multiplied as floats: all CPUs with tiles so far multiply these
// faster than pairs in vectors.
void attend_in_tiles(const Attention& a, Queue& queue, const Scratch& s) {
  if (a.head_dim % (2 * kTileSteps)) return attend_items<Widened<Avx512>>(a, queue, s);
  const Tiles tiles;
  for (const Item* item = queue.take(); item;)
    item = item->num_tokens * a.group() > kFewRows ? attend_item<Tiled>(a, *item, queue, s)
                                                   : attend_item<Widened<Avx512>>(a, *item, queue, s);
}

void products(std::int64_t count) {
  const Tiles tiles;
  constexpr std::int64_t kEach = 4 * kTileRows * kTileRows * 2 * kTileSteps;
  for (std::int64_t done = 0; done < count; done += kEach) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// Linux lends tiles to processes that ask.
bool permitted() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool supported() {
  return has_avx512() && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16") &&
         __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") && permitted();
}

}  // namespace

constinit const Kernels amx_bf16_kernels{.name = "amx_bf16",
                                         .needs = "AMX with BF16, and AVX-512 (F, BW, DQ, VL) with BF16 and VNNI",
                                         .base = &avx512_vnni_kernels,
                                         .lanes = Avx512::kLanes,
                                         .supported = supported,
                                         .worthwhile = nullptr,
                                         .panels_are_faster = nullptr,
                                         .linear_layers = false,
                                         .attend = {nullptr, attend_in_tiles, nullptr, nullptr},
                                         .merge = nullptr,
                                         .norm = nullptr,
                                         .rotation = nullptr,
                                         .gate = nullptr,
                                         .linear_row = nullptr,
                                         .linear = nullptr,
                                         .products = {nullptr, products, nullptr, nullptr},
                                         .read = nullptr};

}  // namespace vattn::kernels
