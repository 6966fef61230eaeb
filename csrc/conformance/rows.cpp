// Kernels of one row.
#include <algorithm>
#include <cmath>

#include "cases.h"
#include "inputs.h"

namespace headrace::conformance {
namespace {

constexpr int kWidths[] = {1, 15, 16, 17, 64, 100, 1000};

Output rms_norm(const Kernels& kernels, int width) {
    const Array<float> x = normal_floats(width, width), weight = normal_floats(width, width + 1);
    Array<float> out(width);
    kernels.rms_norm(x.data(), weight.data(), width, 0x1p-17f, out.data());
    Output output;
    output.add(out.all());
    return output;
}

// From far below where exp() ends to far above, through both zeros; NaN and the infinities.
Output silu_mul(const Kernels& kernels, int width) {
    Array<float> gate(width), up = normal_floats(width, width);
    for (int i = 0; i < width; ++i) gate[i] = float(i - width / 2) * (256.0f / float(width)) + up[i] * 0x1p-4f;
    const float awkward[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 0x1p-126f, 0x1p127f};
    if (width >= 100) std::copy(std::begin(awkward), std::end(awkward), gate.end() - std::size(awkward));
    Array<float> out(width);
    kernels.silu_mul(gate.data(), up.data(), width, out.data());
    Output output;
    output.add(out.all());
    return output;
}

Output add(const Kernels& kernels, int width) {
    const Array<float> x = normal_floats(width, width), y = normal_floats(width, width + 1);
    Array<float> out(width);
    kernels.add(x.data(), y.data(), width, out.data());
    Output output;
    output.add(out.all());
    return output;
}

// Both ways: into other memory, and in place.
Output rotate(const Kernels& kernels, int num_heads, int head_dim, int pairs) {
    const int width = num_heads * head_dim;
    Array<float> x = normal_floats(width, head_dim), cosines(pairs), sines(pairs), out(width);
    Random random(pairs);
    for (int i = 0; i < pairs; ++i) {
        cosines[i] = random.uniform();
        sines[i] = random.uniform();
    }
    kernels.rotate(x.data(), num_heads, head_dim, pairs, cosines.data(), sines.data(), out.data());
    kernels.rotate(x.data(), num_heads, head_dim, pairs, cosines.data(), sines.data(), x.data());
    Output output;
    output.add(out.all());
    output.add(x.all());
    return output;
}

// Computed where they are quantized, into both terms.
Output quantize_inputs(const Kernels& kernels, int width) {
    const Array<float> x = normal_floats(width, width), y = normal_floats(width, width + 1);
    const std::size_t row_bytes = act_row_bytes(Act::q8, width);
    Output output;
    for (const bool is_norm : {true, false}) {
        Array<std::byte> out(row_bytes), rest(row_bytes);
        if (is_norm) {
            kernels.quantize_norm(Act::q8, x.data(), y.data(), width, 0x1p-17f, out.data(), rest.data());
        } else {
            kernels.quantize_gated(Act::q8, x.data(), y.data(), width, out.data(), rest.data());
        }
        output.add(out.all());
        output.add(rest.all());
    }
    return output;
}

Output rotary_angles(const Kernels& kernels, int pairs, int position) {
    Array<double> turns(pairs);
    for (int i = 0; i < pairs; ++i) turns[i] = 1.0 / (1 + i * i);
    Array<float> cosines(pairs), sines(pairs);
    kernels.rotary_angles(turns.data(), pairs, position, 0.75f, cosines.data(), sines.data());
    Output output;
    output.add(cosines.all());
    output.add(sines.all());
    return output;
}

}  // namespace

void add_row_cases(std::vector<Case>& cases) {
    for (const int width : kWidths) {
        const std::string end = std::to_string(width);
        cases.push_back({join({"rms_norm", end}), [=](const Kernels& kernels) { return rms_norm(kernels, width); }});
        cases.push_back({join({"silu_mul", end}), [=](const Kernels& kernels) { return silu_mul(kernels, width); }});
        cases.push_back({join({"add", end}), [=](const Kernels& kernels) { return add(kernels, width); }});
        cases.push_back(
            {join({"quantize_inputs", end}), [=](const Kernels& kernels) { return quantize_inputs(kernels, width); }});
        cases.push_back({join({"rotary_angles", end}),
                         [=](const Kernels& kernels) { return rotary_angles(kernels, width, 8191); }});
    }
    struct Shape {
        int num_heads, head_dim, pairs;
    };
    for (const Shape it : {Shape{1, 16, 8}, Shape{3, 64, 32}, Shape{2, 64, 5}, Shape{2, 80, 20}, Shape{1, 128, 64}}) {
        const std::string width = std::to_string(it.num_heads) + "x" + std::to_string(it.head_dim);
        cases.push_back({join({"rotate", width, std::to_string(it.pairs)}), [it](const Kernels& kernels) {
                             return rotate(kernels, it.num_heads, it.head_dim, it.pairs);
                         }});
    }
}

}  // namespace headrace::conformance
