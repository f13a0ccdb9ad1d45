// The Python module `_kernels`: pointers and sizes in, nothing of torch.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <vector>

#include "attention.h"
#include "cache_layer.h"
#include "decoder_layer.h"
#include "largest.h"
#include "layers.h"
#include "linear.h"
#include "roofline.h"
#include "store.h"
#include "without_lock.h"

namespace nb = nanobind;
using namespace vattn::kernels;
using vattn::without_lock;

namespace {

template <class T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

using Place = std::tuple<std::uintptr_t, std::int64_t, std::int64_t, std::int64_t>;

// New keys or values: bytes of a row, address, strides of a token and a head; and where they are stored.
using NewRows = std::tuple<std::int64_t, std::uintptr_t, std::int64_t, std::int64_t, Place>;

Rows rows(const Place& place) {
  const auto [data, slot, token, head] = place;
  return {pointer<const std::byte>(data), slot, token, head};
}

const Kernels& find(int index) { return kernels()[index]; }

// A layer of a cache, with the kernels that read it.
struct Layer {
  const Kernels* kernels;
  CacheLayer layer;

  void step(std::int64_t tokens, std::uintptr_t new_key, std::int64_t key_token, std::int64_t key_head,
            std::uintptr_t new_value, std::int64_t value_token, std::int64_t value_head, std::uintptr_t homes,
            std::uintptr_t query, std::int64_t query_token, std::int64_t query_head, int count, std::uintptr_t slots,
            std::uintptr_t lengths, std::uintptr_t starts, std::uintptr_t output, int threads) const {
    const CacheCall call{tokens,
                         {pointer<const std::byte>(query), query_token, query_head},
                         {pointer<const std::byte>(new_key), key_token, key_head},
                         {pointer<const std::byte>(new_value), value_token, value_head},
                         {pointer<const std::int64_t>(homes), nullptr},
                         count,
                         pointer<const std::int32_t>(slots),
                         pointer<const std::int32_t>(lengths),
                         pointer<const std::int32_t>(starts),
                         pointer<std::byte>(output)};
    without_lock([&] {
      store(layer, call, threads);
      attend(layer, call, *kernels, threads);
    });
  }
};

// Inputs, outputs, whether it is gated, address of the panels, and of the bias.
using PackedWeight = std::tuple<std::int64_t, std::int64_t, bool, std::uintptr_t, std::uintptr_t>;
// Address and epsilon.
using PackedNorm = std::tuple<std::uintptr_t, float>;

using LayerParts = std::tuple<const Projection*, const Layer*, const Residual*>;

Weight weight(const PackedWeight& packed) {
  const auto [in, out, gated, panels, bias] = packed;
  return {in, out, gated, pointer<const std::uint32_t>(panels), pointer<const std::byte>(bias)};
}

NormWeight norm_weight(const PackedNorm& packed) {
  const auto [address, epsilon] = packed;
  return {pointer<const std::byte>(address), epsilon};
}

}  // namespace

NB_MODULE(_kernels, module) {
  module.def(
      "kernels",
      [] {
        std::vector<std::tuple<std::string, std::string, bool, bool, bool, int, std::vector<bool>>> all;
        for (const Kernels& k : kernels()) {
          const bool supported = k.supported();
          const bool worthwhile = supported && (!k.worthwhile || k.worthwhile());
          std::vector<bool> panels;
          if (k.panels_are_faster) panels = {k.panels_are_faster[0], k.panels_are_faster[1]};
          all.emplace_back(k.name, k.needs, supported, worthwhile, k.linear_layers, k.lanes, panels);
        }
        return all;
      },
      "Of the kernels that were built, the fastest first: name, needs, whether this CPU has them, whether they are "
      "worthwhile on it, whether their linear layers are, floats in a vector, and whether 8-bit keys were found to "
      "be faster in panels, with gaps and without, if these kernels choose.");

  module.def(
      "take_keys", [](int keys) { keys_taken = static_cast<Keys>(keys); },
      "How keys of few rows are taken, by all kernels: 0 as is faster, 1 as they lie, 2 in panels.");

  module.def(
      "attend",
      [](int kernel, int query_type, int stored_type, int scale_type, int num_heads, int num_kv_heads, int head_dim,
         int v_head_dim, std::uintptr_t query, std::int64_t query_token_stride, std::int64_t query_head_stride,
         std::uintptr_t output, const Place& key, const Place& value, const Place& key_scale, const Place& value_scale,
         int count, std::uintptr_t slots, std::uintptr_t lengths, std::uintptr_t starts, std::uintptr_t table,
         std::int64_t table_stride, int block_size, float scale, float softcap, int window, std::uintptr_t sinks,
         int threads) {
        const Attention attention{
            {count, pointer<const std::int32_t>(slots), pointer<const std::int32_t>(lengths),
             pointer<const std::int32_t>(starts), pointer<const std::int32_t>(table), table_stride, block_size},
            static_cast<Type>(query_type),
            static_cast<Type>(stored_type),
            static_cast<Type>(scale_type),
            num_heads,
            num_kv_heads,
            head_dim,
            v_head_dim,
            pointer<const std::byte>(query),
            query_token_stride,
            query_head_stride,
            pointer<std::byte>(output),
            rows(key),
            rows(value),
            rows(key_scale),
            rows(value_scale),
            scale,
            softcap,
            window,
            pointer<const float>(sinks),
            threads};
        without_lock([&] { attend(attention, find(kernel)); });
      },
      "Attention of new tokens over stored keys and values; see attention.h. Addresses are integers, strides bytes.");

  module.def(
      "check",
      [](int count, std::uintptr_t slots, std::uintptr_t lengths, std::uintptr_t starts, std::uintptr_t table,
         std::int64_t table_stride, int block_size, std::int64_t num_rows, std::int64_t num_slots,
         std::int64_t num_tokens, std::int64_t num_blocks) {
        const Requests requests{count,
                                pointer<const std::int32_t>(slots),
                                pointer<const std::int32_t>(lengths),
                                pointer<const std::int32_t>(starts),
                                pointer<const std::int32_t>(table),
                                table_stride,
                                block_size};
        const Finding found = check(requests, {num_rows, num_slots, num_tokens, num_blocks});
        return std::tuple(static_cast<int>(found.wrong), found.least, found.most);
      },
      "Which numbers of a call of `attend` are outside of its tensors, and their range: (0, 0, 0), or 1 for starts, 2 "
      "for lengths, 3 for slots, 4 for blocks.");

  module.def(
      "store",
      [](std::int64_t tokens, std::int64_t heads, const NewRows& key, const NewRows& value, std::uintptr_t slots,
         std::uintptr_t positions, int threads) {
        without_lock([&] {
          for (const auto& [bytes, source, source_token, source_head, target] : {key, value}) {
            const auto [data, slot, token, head] = target;
            store({tokens, heads, bytes, pointer<const std::byte>(source), source_token, source_head,
                   pointer<std::byte>(data), slot, token, head, pointer<const std::int64_t>(slots),
                   pointer<const std::int64_t>(positions)},
                  threads);
          }
        });
      },
      "Stores new keys and values; see store.h. Addresses are integers, strides bytes.");

  nb::class_<Layer>(module, "Layer", "A layer whose memory does not move; see `vattn.cpu.Layer`.")
      .def(
          "__init__",
          [](Layer* self, int kernel, int type, int num_heads, int num_kv_heads, int head_dim, int v_head_dim,
             const Place& key, const Place& value, const Place& key_home, const Place& value_home, std::uintptr_t table,
             std::int64_t table_stride, int block_size, float scale, float softcap, int window, std::uintptr_t sinks) {
            const auto stored = static_cast<Type>(type);
            const auto home = [&](const Place& place, int dim) {
              const auto [data, slot, token, head] = place;
              return Store{.heads = num_kv_heads,
                           .bytes = dim * size_of(stored),
                           .target = pointer<std::byte>(data),
                           .target_slot = slot,
                           .target_token = token,
                           .target_head = head};
            };
            Attention attention{};
            attention.query_type = attention.stored_type = stored;
            attention.num_heads = num_heads;
            attention.num_kv_heads = num_kv_heads;
            attention.head_dim = head_dim;
            attention.v_head_dim = v_head_dim;
            attention.key = rows(key);
            attention.value = rows(value);
            attention.table = pointer<const std::int32_t>(table);
            attention.table_stride = table_stride;
            attention.block_size = block_size;
            attention.scale = scale;
            attention.softcap = softcap;
            attention.window = window;
            attention.sinks = pointer<const float>(sinks);
            new (self) Layer{&find(kernel), {attention, home(key_home, head_dim), home(value_home, v_head_dim)}};
          })
      .def("step", &Layer::step);

  module.def(
      "norm",
      [](int kernel, int type, std::int64_t rows, std::int64_t width, std::int64_t stride, std::uintptr_t input,
         std::uintptr_t weight, float epsilon, std::uintptr_t output, int threads) {
        const Norm norm{static_cast<Type>(type),
                        rows,
                        width,
                        stride,
                        pointer<const std::byte>(input),
                        pointer<const std::byte>(weight),
                        epsilon,
                        pointer<std::byte>(output)};
        without_lock([&] { compute(norm, find(kernel), threads); });
      },
      "Root mean square norm of rows; see layers.h. Strides are elements.");

  module.def(
      "rotate",
      [](int kernel, int type, std::int64_t tokens, std::int64_t stride, int num_queries, int num_keys, int head_dim,
         std::uintptr_t heads, std::uintptr_t cos, std::uintptr_t sin, std::uintptr_t query_weight,
         std::uintptr_t key_weight, float epsilon, int threads) {
        const Rotation rotation{static_cast<Type>(type),
                                tokens,
                                stride,
                                num_queries,
                                num_keys,
                                head_dim,
                                pointer<std::byte>(heads),
                                pointer<const std::byte>(cos),
                                pointer<const std::byte>(sin),
                                pointer<const std::byte>(query_weight),
                                pointer<const std::byte>(key_weight),
                                epsilon};
        without_lock([&] { compute(rotation, find(kernel), threads); });
      },
      "Rotary embedding of queries and keys in place, with norms where there are weights; see layers.h.");

  module.def(
      "gate",
      [](int kernel, int type, std::int64_t rows, std::int64_t width, std::uintptr_t input, std::uintptr_t output,
         int threads) {
        const Gate gate{static_cast<Type>(type), rows, width, pointer<const std::byte>(input),
                        pointer<std::byte>(output)};
        without_lock([&] { compute(gate, find(kernel), threads); });
      },
      "silu(first half) * second half of rows; see layers.h.");

  module.def(
      "linear",
      [](int kernel, std::int64_t rows, std::uintptr_t input, std::int64_t input_stride, const PackedWeight& packed,
         std::uintptr_t other, std::uintptr_t output, int threads) {
        const Linear linear{rows,           pointer<const std::byte>(input), input_stride,
                            weight(packed), pointer<const std::byte>(other), pointer<std::byte>(output)};
        without_lock([&] { compute(linear, find(kernel), threads); });
      },
      "A linear layer over packed weights; see linear.h. The stride is in bytes.");

  nb::class_<Projection>(module, "Projection", "Queries, keys and values of a layer; see decoder_layer.h.")
      .def("__init__",
           [](Projection* self, const PackedNorm& norm, const PackedWeight& packed, int num_queries, int num_keys,
              int head_dim, std::uintptr_t query_norm, std::uintptr_t key_norm, float head_epsilon) {
             new (self) Projection{norm_weight(norm),
                                   weight(packed),
                                   num_queries,
                                   num_keys,
                                   head_dim,
                                   pointer<const std::byte>(query_norm),
                                   pointer<const std::byte>(key_norm),
                                   head_epsilon};
           })
      .def("compute", [](const Projection& self, int kernel, std::int64_t tokens, std::uintptr_t input,
                         std::uintptr_t cos, std::uintptr_t sin, std::uintptr_t heads, int threads) {
        const ProjectionCall call{tokens, pointer<const std::byte>(input), pointer<const std::byte>(cos),
                                  pointer<const std::byte>(sin), pointer<std::byte>(heads)};
        without_lock([&] { compute(self, call, find(kernel), threads); });
      });

  nb::class_<Residual>(module, "Residual", "What follows the attention of a layer; see decoder_layer.h.")
      .def("__init__",
           [](Residual* self, const PackedWeight& output, const PackedNorm& norm, const PackedWeight& gate_up,
              const PackedWeight& down) {
             new (self) Residual{weight(output), norm_weight(norm), weight(gate_up), weight(down)};
           })
      .def("compute", [](const Residual& self, int kernel, std::int64_t tokens, std::uintptr_t input,
                         std::uintptr_t attended, std::uintptr_t result, int threads) {
        const ResidualCall call{tokens, pointer<const std::byte>(input), pointer<const std::byte>(attended),
                                pointer<std::byte>(result)};
        without_lock([&] { compute(self, call, find(kernel), threads); });
      });

  module.def(
      "run_layers",
      [](int kernel, const std::vector<LayerParts>& parts, std::uintptr_t homes, std::uintptr_t positions,
         std::int64_t tokens, std::uintptr_t rows, std::uintptr_t cos, std::uintptr_t sin, int count,
         std::uintptr_t slots, std::uintptr_t lengths, std::uintptr_t starts, int threads) {
        std::vector<DecoderLayer> layers;
        layers.reserve(parts.size());
        for (const auto& [projection, cache, residual] : parts) layers.push_back({projection, &cache->layer, residual});
        const DecoderCall call{{pointer<const std::int64_t>(homes), pointer<const std::int64_t>(positions)},
                               tokens,
                               pointer<std::byte>(rows),
                               pointer<const std::byte>(cos),
                               pointer<const std::byte>(sin),
                               count,
                               pointer<const std::int32_t>(slots),
                               pointer<const std::int32_t>(lengths),
                               pointer<const std::int32_t>(starts)};
        DecoderTimes times;
        without_lock([&] { times = compute(layers, call, find(kernel), threads); });
        return std::tuple(times.projection, times.store, times.attention, times.residual);
      },
      "Decoder layers one after the other, over rows in place; returns the seconds in each of their parts. See "
      "decoder_layer.h.");

  module.def(
      "largest",
      [](int type, std::int64_t rows, std::int64_t width, std::int64_t stride, std::uintptr_t input,
         std::uintptr_t indices, int threads) {
        const Largest largest{static_cast<Type>(type),       rows, width, stride, pointer<const std::byte>(input),
                              pointer<std::int64_t>(indices)};
        bool finite = false;
        without_lock([&] { finite = compute(largest, threads); });
        return finite;
      },
      "Where the largest element of each row is, and whether all are finite; see largest.h. Strides are elements.");

  module.def(
      "products",
      [](int kernel, int stored_type, std::int64_t count, int threads) {
        without_lock([&] { products(find(kernel), static_cast<Type>(stored_type), count, threads); });
      },
      "As many multiply-adds and nothing else; see roofline.h.");

  module.def(
      "read",
      [](int kernel, std::uintptr_t data, std::int64_t bytes, int threads) {
        without_lock([&] { read(find(kernel), pointer<const std::byte>(data), bytes, threads); });
      },
      "Reads memory and does nothing else; see roofline.h.");
}
