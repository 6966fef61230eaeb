// Single kernels, callable from Python: what tests/backend/test_kernels.py compares with numpy. Nothing else uses them.
// Each packs, quantizes and stores what its kernel needs, on the calling thread.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "arrays.h"
#include "kernels.h"
#include "memory.h"

namespace headrace {

void bind_kernels(nb::module_& module);

namespace {

using nb::literals::operator""_a;

template <class T, int Dims>
using Array = nb::ndarray<const T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;
using VectorArray = Array<float, 1>;
using RowArray = Array<float, 2>;
using HeadArray = Array<float, 3>;  // [tokens, heads, head_dim]

void require(bool is_right, const char* what) {
    if (!is_right) throw nb::value_error(what);
}

// A matrix packed from the bytes of its rows.
struct Packed {
    Matrix matrix;
    Memory memory;

    Packed(const Kernels& kernels, const std::string& format, int rows, int cols, const Array<std::uint8_t, 1>& data)
        : matrix{format_named(format), rows, cols, nullptr} {
        const FormatTraits& form = traits(matrix.format);
        require(rows > 0 && cols > 0 && cols % form.file_block_values == 0, "rows and cols must be whole blocks");
        require(data.size() == std::size_t(rows) * (cols / form.file_block_values) * form.file_block_bytes,
                "data must hold rows x cols values");
        memory = Memory(matrix.bytes());
        for (int tile = 0; tile < matrix.num_tiles(); ++tile) {
            kernels.pack_tile(matrix, tile, reinterpret_cast<const std::byte*>(data.data()),
                              memory.data() + tile * matrix.tile_bytes());
        }
        matrix.tiles = memory.data();
    }
};

nb::object unpack(const std::string& isa, const std::string& format, int rows, int cols, Array<std::uint8_t, 1> data) {
    const Kernels& kernels = kernels_named(isa);
    const Packed weight(kernels, format, rows, cols, data);
    NewArray<float> out(rows, cols, 0.0f, true);
    for (int row = 0; row < rows; ++row) {
        kernels.unpack_row(weight.matrix, row, out.data + std::size_t(row) * cols);
    }
    return out.object;
}

Act act_named(const std::string& name) {
    require(name == "f32" || name == "bf16" || name == "q8", "act must be f32, bf16 or q8");
    return name == "f32" ? Act::f32 : name == "bf16" ? Act::bf16 : Act::q8;
}

// Rows in activation form, or what the first term of 8 bits leaves over. `quantize_at` gets a row's number and places.
template <class QuantizeAt>
nb::object quantized(Act act, std::size_t rows, std::size_t cols, bool wants_rest, const QuantizeAt& quantize_at) {
    const std::size_t row_bytes = act_row_bytes(act, int(cols));
    NewArray<std::uint8_t> out(rows, row_bytes, 0, true);
    require(!wants_rest || act == Act::q8, "only q8 leaves a rest");
    Memory other(row_bytes);
    for (std::size_t row = 0; row < rows; ++row) {
        std::byte* wanted = reinterpret_cast<std::byte*>(out.data) + row * row_bytes;
        quantize_at(row, wants_rest ? other.data() : wanted, wants_rest ? wanted : nullptr);
    }
    return out.object;
}

nb::object quantize(const std::string& isa, const std::string& act_name, RowArray x, bool wants_rest) {
    const Kernels& kernels = kernels_named(isa);
    const Act act = act_named(act_name);
    const std::size_t cols = x.shape(1);
    return quantized(act, x.shape(0), cols, wants_rest, [&](std::size_t row, std::byte* out, std::byte* rest) {
        kernels.quantize_row(act, x.data() + row * cols, int(cols), out, rest);
    });
}

nb::object quantize_norm(const std::string& isa, const std::string& act_name, RowArray x, VectorArray weight, float eps,
                         bool wants_rest) {
    const Kernels& kernels = kernels_named(isa);
    const Act act = act_named(act_name);
    const std::size_t cols = x.shape(1);
    require(weight.shape(0) == cols, "weight must be as wide as x");
    return quantized(act, x.shape(0), cols, wants_rest, [&](std::size_t row, std::byte* out, std::byte* rest) {
        kernels.quantize_norm(act, x.data() + row * cols, weight.data(), int(cols), eps, out, rest);
    });
}

nb::object quantize_gated(const std::string& isa, const std::string& act_name, RowArray gate, RowArray up,
                          bool wants_rest) {
    const Kernels& kernels = kernels_named(isa);
    const Act act = act_named(act_name);
    const std::size_t cols = gate.shape(1);
    require(up.shape(0) == gate.shape(0) && up.shape(1) == cols, "gate and up must have one shape");
    return quantized(act, gate.shape(0), cols, wants_rest, [&](std::size_t row, std::byte* out, std::byte* rest) {
        kernels.quantize_gated(act, gate.data() + row * cols, up.data() + row * cols, int(cols), out, rest);
    });
}

nb::object rotary(const std::string& isa, Array<double, 1> turns, int position, float magnitude) {
    const std::size_t pairs = turns.shape(0);
    NewArray<float> out(2, pairs, 0.0f, true);
    kernels_named(isa).rotary_angles(turns.data(), int(pairs), position, magnitude, out.data, out.data + pairs);
    return out.object;
}

nb::object gemm(const std::string& isa, const std::string& format, int rows, Array<std::uint8_t, 1> data, RowArray x,
                std::optional<RowArray> add, int tiles_per_call) {
    const Kernels& kernels = kernels_named(isa);
    require(tiles_per_call > 0, "tiles_per_call must be positive");
    const std::size_t num_rows = x.shape(0), cols = x.shape(1);
    const Packed weight(kernels, format, rows, int(cols), data);
    require(!add || (add->shape(0) == num_rows && add->shape(1) == std::size_t(rows)), "add must be [len(x), rows]");
    const Act act = traits(weight.matrix.format).act;
    const std::size_t act_stride = act_row_bytes(act, int(cols));
    Memory acts(num_rows * act_stride);
    for (std::size_t row = 0; row < num_rows; ++row) {
        kernels.quantize_row(act, x.data() + row * cols, int(cols), acts.data() + row * act_stride, nullptr);
    }
    NewArray<float> out(num_rows, rows, 0.0f, true);
    const int num_tiles = weight.matrix.num_tiles(), step = std::min(tiles_per_call, num_tiles);
    for (int tile = 0; tile < num_tiles; tile += step) {
        kernels.gemm({.w = &weight.matrix,
                      .tile_begin = tile,
                      .tile_end = std::min(tile + step, num_tiles),
                      .acts = acts.data(),
                      .act_stride = act_stride,
                      .num_rows = int(num_rows),
                      .out = out.data,
                      .out_stride = std::size_t(rows),
                      .add = add ? add->data() : nullptr,
                      .add_stride = std::size_t(rows)});
    }
    return out.object;
}

std::vector<std::int32_t> find_contenders(const std::string& isa, VectorArray logits, float margin, int most) {
    std::vector<std::int32_t> tokens(std::max(most, 0));
    tokens.resize(kernels_named(isa).find_contenders(logits.data(), int(logits.shape(0)), margin, int(tokens.size()),
                                                     tokens.data()));
    return tokens;
}

nb::object rms_norm(const std::string& isa, RowArray x, VectorArray weight, float eps) {
    require(x.shape(1) == weight.shape(0), "weight must be as wide as x");
    NewArray<float> out(x.shape(0), x.shape(1), 0.0f, true);
    for (std::size_t row = 0; row < x.shape(0); ++row) {
        const std::size_t at = row * x.shape(1);
        kernels_named(isa).rms_norm(x.data() + at, weight.data(), int(x.shape(1)), eps, out.data + at);
    }
    return out.object;
}

nb::object two_rows(void (*Kernels::*kernel)(const float*, const float*, int, float*), const std::string& isa,
                    VectorArray x, VectorArray y) {
    require(x.shape(0) == y.shape(0), "both rows must have the same width");
    NewArray<float> out(x.shape(0), 0, 0.0f, false);
    (kernels_named(isa).*kernel)(x.data(), y.data(), int(x.shape(0)), out.data);
    return out.object;
}

nb::object rotate(const std::string& isa, RowArray x, VectorArray cosines, VectorArray sines, bool in_place) {
    const int num_heads = int(x.shape(0)), head_dim = int(x.shape(1)), pairs = int(cosines.shape(0));
    require(sines.shape(0) == cosines.shape(0) && 2 * pairs <= head_dim, "cosines and sines must be of half a head");
    NewArray<float> out(num_heads, head_dim, 0.0f, true);
    if (in_place) std::copy_n(x.data(), x.size(), out.data);
    kernels_named(isa).rotate(in_place ? out.data : x.data(), num_heads, head_dim, pairs, cosines.data(), sines.data(),
                              out.data);
    return out.object;
}

// The attention of consecutive tokens, from first_position on, of a sequence whose keys and values are given in full.
// Unused slots hold `garbage` in every byte. One call to attend() takes up to `queries_per_call` tokens.
struct AttendCase {
    const Kernels& kernels;
    KvLayer kv;
    Memory memory;
    const std::int32_t* block_table;
    float scale;

    void store(const HeadArray& keys, const HeadArray& values) const {
        const std::size_t token_floats = std::size_t(kv.num_kv_heads) * kv.head_dim;
        for (std::size_t token = 0; token < keys.shape(0); ++token) {
            kernels.store_kv(kv, block_table[token / kBlockTokens], int(token % kBlockTokens),
                             keys.data() + token * token_floats, values.data() + token * token_floats);
        }
    }

    // Queries and out of the heads of `kv_head`: rows of num_heads * head_dim floats.
    void run(int kv_head, const float* queries, int num_queries, int num_heads, int first_position, float* out) const {
        const int heads = num_heads / kv.num_kv_heads, states = num_queries * heads;
        const int num_segments = (first_position + num_queries - 1) / kSegmentTokens + 1;
        const std::size_t row_floats = std::size_t(num_heads) * kv.head_dim,
                          acc_floats = std::size_t(states) * kv.head_dim;
        std::vector<float> max(num_segments * states), sum(num_segments * states), acc(num_segments * acc_floats);
        const std::size_t at = std::size_t(kv_head) * heads * kv.head_dim;
        std::vector<AttendQuery> rows(num_queries);
        for (int segment = 0; segment < num_segments; ++segment) {
            const int first_block = segment * (kSegmentTokens / kBlockTokens);
            for (int query = 0; query < num_queries; ++query) {
                const std::size_t state = std::size_t(segment) * states + query * heads;
                rows[query] = {queries + query * row_floats + at, first_position + query, max.data() + state,
                               sum.data() + state, acc.data() + state * kv.head_dim};
            }
            kernels.attend({.kv = &kv,
                            .blocks = block_table + first_block,
                            .num_blocks = (first_position + num_queries - 1) / kBlockTokens + 1 - first_block,
                            .next_blocks = block_table,
                            .num_next_blocks = 1,
                            .next_kv_head = kv_head,
                            .kv_head = kv_head,
                            .heads_per_kv = heads,
                            .queries = rows.data(),
                            .num_queries = num_queries,
                            .segment = segment,
                            .scale = scale});
        }
        for (int state = 0; state < states; ++state) {
            kernels.merge(max.data() + state, sum.data() + state, states, acc.data() + state * kv.head_dim, acc_floats,
                          num_segments, kv.head_dim,
                          out + at + state / heads * row_floats + state % heads * kv.head_dim);
        }
    }
};

nb::object attend(const std::string& isa, const std::string& kv_type, HeadArray queries, HeadArray keys,
                  HeadArray values, Array<std::int32_t, 1> block_table, int first_position, float scale,
                  int queries_per_call, int garbage) {
    require(kv_type == "bf16" || kv_type == "f32", "kv_type must be bf16 or f32");
    const int num_queries = int(queries.shape(0)), num_heads = int(queries.shape(1)), head_dim = int(keys.shape(2));
    const int num_tokens = int(keys.shape(0)), num_kv_heads = int(keys.shape(1));
    const int num_blocks = (num_tokens + kBlockTokens - 1) / kBlockTokens;
    require(head_dim > 0 && head_dim <= kMaxHeadDim && head_dim % kLanes == 0, "head_dim must be 16 to 256, by 16");
    require(int(queries.shape(2)) == head_dim && num_kv_heads > 0 && num_heads % num_kv_heads == 0,
            "queries must be [queries, whole groups of heads, head_dim]");
    require(values.shape(0) == keys.shape(0) && values.shape(1) == keys.shape(1) && values.shape(2) == keys.shape(2),
            "keys and values must have one shape");
    require(first_position >= 0 && first_position + num_queries <= num_tokens && queries_per_call > 0,
            "queries must be tokens of the sequence");
    require(int(block_table.shape(0)) >= num_blocks, "block_table must hold the sequence");
    int most = 0;
    for (std::size_t i = 0; i < block_table.size(); ++i) {
        require(block_table.data()[i] >= 0 && block_table.data()[i] < 65536, "block ids must be 0 to 65535");
        most = std::max(most, int(block_table.data()[i]));
    }
    KvLayer kv{kv_type == "f32" ? KvType::f32 : KvType::bf16, num_kv_heads, head_dim, nullptr, 0};
    kv.block_stride = 2 * num_kv_heads * kv.plane_bytes();
    Memory memory((most + 1) * kv.block_stride);
    std::fill_n(memory.data(), (most + 1) * kv.block_stride, std::byte(garbage));
    kv.base = memory.data();
    const AttendCase attention{kernels_named(isa), kv, std::move(memory), block_table.data(), scale};
    attention.store(keys, values);
    const std::size_t row_floats = std::size_t(num_heads) * head_dim;
    NewArray<float> out(num_queries, row_floats, 0.0f, true);
    for (int query = 0; query < num_queries; query += queries_per_call) {
        const int count = std::min(queries_per_call, num_queries - query);
        for (int head = 0; head < num_kv_heads; ++head) {
            attention.run(head, queries.data() + query * row_floats, count, num_heads, first_position + query,
                          out.data + query * row_floats);
        }
    }
    return out.object;
}

}  // namespace

void bind_kernels(nb::module_& module) {
    module.def("kernel_unpack", &unpack, "isa"_a, "format"_a, "rows"_a, "cols"_a, "data"_a);
    module.def("kernel_quantize", &quantize, "isa"_a, "act"_a, "x"_a, "wants_rest"_a = false);
    module.def("kernel_quantize_norm", &quantize_norm, "isa"_a, "act"_a, "x"_a, "weight"_a, "eps"_a,
               "wants_rest"_a = false);
    module.def("kernel_quantize_gated", &quantize_gated, "isa"_a, "act"_a, "gate"_a, "up"_a, "wants_rest"_a = false);
    module.def("kernel_rotary", &rotary, "isa"_a, "turns"_a, "position"_a, "magnitude"_a);
    module.def("kernel_gemm", &gemm, "isa"_a, "format"_a, "rows"_a, "data"_a, "x"_a, "add"_a = nb::none(),
               "tiles_per_call"_a = 1 << 20);
    module.def("kernel_find_contenders", &find_contenders, "isa"_a, "logits"_a, "margin"_a, "most"_a);
    module.def("kernel_rms_norm", &rms_norm, "isa"_a, "x"_a, "weight"_a, "eps"_a);
    module.def(
        "kernel_silu_mul",
        [](const std::string& isa, VectorArray gate, VectorArray up) {
            return two_rows(&Kernels::silu_mul, isa, gate, up);
        },
        "isa"_a, "gate"_a, "up"_a);
    module.def(
        "kernel_add",
        [](const std::string& isa, VectorArray x, VectorArray y) { return two_rows(&Kernels::add, isa, x, y); },
        "isa"_a, "x"_a, "y"_a);
    module.def("kernel_rotate", &rotate, "isa"_a, "x"_a, "cosines"_a, "sines"_a, "in_place"_a = false);
    module.def("kernel_attend", &attend, "isa"_a, "kv_type"_a, "queries"_a, "keys"_a, "values"_a, "block_table"_a,
               "first_position"_a, "scale"_a, nb::kw_only(), "queries_per_call"_a = 1 << 20, "garbage"_a = 0xff);
}

}  // namespace headrace
