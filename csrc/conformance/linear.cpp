// Packing, activation forms and products, for every weight format.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "cases.h"
#include "inputs.h"

namespace headrace::conformance {
namespace {

constexpr Format kFormats[] = {Format::f32, Format::f16, Format::bf16, Format::q8_0, Format::q4_0, Format::q4_1};

std::string dimensions(int rows, int cols) { return std::to_string(rows) + "x" + std::to_string(cols); }

void put_f16(std::byte* at, Random& random, int lowest_exponent) {  // any sign and fraction, five binades
    const int sign = random.below(2), exponent = lowest_exponent + random.below(5), fraction = random.below(1024);
    const auto half = std::uint16_t(sign << 15 | exponent << 10 | fraction);
    std::memcpy(at, &half, sizeof half);
}

void put_value(Format format, std::byte* at, Random& random) {
    if (format == Format::f16) return put_f16(at, random, 11);
    const float x = random.normal();
    if (format == Format::f32) {
        std::memcpy(at, &x, sizeof x);
    } else {
        const auto top = std::uint16_t(std::bit_cast<std::uint32_t>(x) >> 16);
        std::memcpy(at, &top, sizeof top);
    }
}

// Packed, and with the signs of its values taken away if `is_magnitude` (bf16 alone).
struct Packed {
    Matrix matrix;
    Array<std::byte> tiles;

    Packed(const Kernels& kernels, Format format, int rows, int cols, bool is_magnitude = false)
        : matrix{format, rows, cols, nullptr}, tiles(matrix.bytes()) {
        const Array<std::byte> source = file_weight(format, rows, cols, rows * 1000 + cols);
        if (is_magnitude) {
            for (std::size_t i = 1; i < source.size(); i += 2) source[i] &= std::byte{0x7f};
        }
        for (int tile = 0; tile < matrix.num_tiles(); ++tile) {
            kernels.pack_tile(matrix, tile, source.data(), tiles.data() + tile * matrix.tile_bytes());
        }
        matrix.tiles = tiles.data();
    }
};

Output unpack(const Kernels& kernels, Format format, int rows, int cols) {
    const Packed weight(kernels, format, rows, cols);
    Output output;
    for (int row = 0; row < rows; ++row) {
        Array<float> out(cols);
        kernels.unpack_row(weight.matrix, row, out.data());
        output.add(out.all());
    }
    return output;
}

// Ordinary numbers; groups of zeros, of next to nothing, of ties between integers; infinity and NaN.
Array<float> awkward_row(int cols) {
    Array<float> x = normal_floats(cols, cols);
    for (int i = 0; i < cols; ++i) {
        if (i / kGroup == 1) x[i] = 0;
        if (i / kGroup == 2) x[i] = float(i) * 0x1p-110f;
        if (i / kGroup == 3) x[i] = float(i % kGroup) - 126.5f + (i % kGroup == 0 ? -0.5f : 0.0f);
        if (i / kGroup == 4) x[i] *= 0x1p60f;
    }
    if (cols > 5 * kGroup) x[5 * kGroup + 1] = INFINITY;
    if (cols > 6 * kGroup) x[6 * kGroup + 30] = NAN;
    return x;
}

Output quantize(const Kernels& kernels, Act act, int cols, bool wants_rest) {
    const Array<float> x = awkward_row(cols);
    Array<std::byte> out(act_row_bytes(act, cols)), rest(act_row_bytes(act, cols));
    kernels.quantize_row(act, x.data(), cols, out.data(), wants_rest ? rest.data() : nullptr);
    Output output;
    output.add(out.all());
    output.add(rest.all());
    return output;
}

// Ids as floats: small integers, exact.
Output contenders(const Kernels& kernels, int vocab, float margin) {
    Array<float> logits = normal_floats(vocab, vocab);
    if (vocab > 20) logits[vocab - 2] = std::numeric_limits<float>::quiet_NaN();
    Array<std::int32_t> tokens(vocab);
    const int count = kernels.find_contenders(logits.data(), vocab, margin, kMaxContenders, tokens.data());
    Array<float> found(vocab);
    for (int i = 0; i < vocab; ++i) found[i] = i < count ? float(tokens[i]) : -1.0f;
    Output output;
    output.add(found.all());
    return output;
}

struct Product {
    Format format;
    int outputs;
    int inputs;
    int num_rows;
    bool has_add = false;
};

// Inputs or, for bounds, their magnitudes times those of the weights. Rows of outputs lie 3 floats apart, untouched.
Output multiply(const Kernels& kernels, const Product& product, bool is_magnitude = false) {
    const Packed weight(kernels, product.format, product.outputs, product.inputs, is_magnitude);
    const Act act = traits(product.format).act;
    const std::size_t act_stride = act_row_bytes(act, product.inputs), stride = product.outputs + 3;
    Array<float> x = normal_floats(std::size_t(product.num_rows) * product.inputs, product.inputs);
    Array<float> add = normal_floats(product.num_rows * stride, product.outputs);
    if (is_magnitude) {
        for (float& it : x) it = std::fabs(it);
        for (float& it : add) it = std::fabs(it);
    }
    Array<std::byte> acts(product.num_rows * act_stride);
    for (int row = 0; row < product.num_rows; ++row) {
        kernels.quantize_row(act, x.data() + std::size_t(row) * product.inputs, product.inputs,
                             acts.data() + row * act_stride, nullptr);
    }
    Array<float> out(product.num_rows * stride);
    const int num_tiles = weight.matrix.num_tiles(), middle = num_tiles / 2;
    for (const auto [begin, end] : {std::array{0, middle}, std::array{middle, num_tiles}}) {
        kernels.gemm({.w = &weight.matrix,
                      .tile_begin = begin,
                      .tile_end = end,
                      .acts = acts.data(),
                      .act_stride = act_stride,
                      .num_rows = product.num_rows,
                      .out = out.data(),
                      .out_stride = stride,
                      .add = product.has_add ? add.data() : nullptr,
                      .add_stride = stride});
    }
    Output output;
    output.add(out.all());
    return output;
}

// A chain of n sums errs by n units of the sum of magnitudes at most, on either side (Higham 2002, section 3.1).
std::vector<float> product_bounds(const Kernels& oracle, const Product& product) {
    const Output output = multiply(oracle, product, true);
    std::vector<float> bounds;
    for (const std::uint32_t word : output.words()) {
        bounds.push_back(std::bit_cast<float>(word) * float(product.inputs + 1) * 2 * kUnit);
    }
    return bounds;
}

void add_product(std::vector<Case>& cases, const Product& it) {
    Case added{join({it.has_add ? "gemm+add" : "gemm", traits(it.format).name, dimensions(it.outputs, it.inputs),
                     std::to_string(it.num_rows)}),
               [it](const Kernels& kernels) { return multiply(kernels, it); }};
    if (it.format == Format::bf16) added.bounds = [it](const Kernels& oracle) { return product_bounds(oracle, it); };
    cases.push_back(std::move(added));
}

}  // namespace

Array<std::byte> file_weight(Format format, int rows, int cols, std::uint64_t seed) {
    const FormatTraits& it = traits(format);
    Array<std::byte> bytes(std::size_t(rows) * (cols / it.file_block_values) * it.file_block_bytes);
    Random random(seed);
    for (std::size_t at = 0; at < bytes.size(); at += it.file_block_bytes) {
        if (it.file_block_values == 1) {
            put_value(format, bytes.data() + at, random);
            continue;
        }
        for (int i = 0; i < it.file_block_bytes; ++i) bytes[at + i] = std::byte(random.below(256));
        put_f16(bytes.data() + at, random, 5);
        if (format == Format::q4_1) put_f16(bytes.data() + at + 2, random, 8);
    }
    return bytes;
}

void add_linear_cases(std::vector<Case>& cases) {
    for (const Format format : kFormats) {
        const bool is_blocks = traits(format).file_block_values > 1;
        for (const auto& [rows, cols] : {std::array{16, 32}, std::array{33, 96}, std::array{5, is_blocks ? 160 : 47}}) {
            cases.push_back({join({"unpack", traits(format).name, dimensions(rows, cols)}),
                             [=](const Kernels& kernels) { return unpack(kernels, format, rows, cols); }});
        }
    }
    for (const auto& [act, name] : {std::pair{Act::f32, "f32"}, {Act::bf16, "bf16"}, {Act::q8, "q8"}}) {
        for (const int cols : {1, 32, 47, 96, 240}) {
            cases.push_back({join({"quantize", name, std::to_string(cols)}),
                             [=](const Kernels& kernels) { return quantize(kernels, act, cols, false); }});
        }
    }
    for (const int cols : {47, 240}) {
        cases.push_back({join({"quantize", "q8+rest", std::to_string(cols)}),
                         [=](const Kernels& kernels) { return quantize(kernels, Act::q8, cols, true); }});
    }
    for (const int vocab : {1, 16, 47, 200}) {
        cases.push_back({join({"contenders", std::to_string(vocab)}),
                         [=](const Kernels& kernels) { return contenders(kernels, vocab, 1.0f); }});
    }
    for (const Format format : kFormats) {
        for (const int rows : {1, 2, 3, 4, 5, 7, 8, 13, 33}) add_product(cases, {format, 50, 96, rows});
        add_product(cases, {format, 16, 32, 1});
        add_product(cases, {format, 5, 576, 6});
        add_product(cases, {format, 100, 64, 11, true});
        if (traits(format).file_block_values == 1) add_product(cases, {format, 33, 47, 9});
    }
}

}  // namespace headrace::conformance
