// Arrays at the border to Python: checked views of what comes in, fresh arrays for what goes out.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <span>
#include <string>

#include "batch.h"
#include "kernels.h"

namespace headrace {

namespace nb = nanobind;

// A view of a contiguous array of T; ValueError, by name, for anything else. Valid while the caller holds the array.
template <class T>
std::span<const T> view(nb::handle object, const char* name) {
    nb::ndarray<nb::ro, nb::device::cpu> array;
    const bool is_array = nb::try_cast(object, array, false);
    if (!is_array || array.dtype() != nb::dtype<T>()) {
        throw nb::value_error((std::string(name) + " must be an array of " +
                               (std::is_floating_point_v<T> ? "float"
                                : std::is_signed_v<T>       ? "int"
                                                            : "uint") +
                               std::to_string(8 * sizeof(T)))
                                  .c_str());
    }
    std::int64_t expected = 1;  // stride of the last axis
    for (std::size_t axis = array.ndim(); axis-- > 0; expected *= std::int64_t(array.shape(axis))) {
        if (array.size() > 0 && array.shape(axis) > 1 && array.stride(axis) != expected) {
            throw nb::value_error((std::string(name) + " must be contiguous").c_str());
        }
    }
    return {static_cast<const T*>(array.data()), array.size()};
}

// A new numpy array [rows, cols] (or [rows], for cols == 0) and where its memory is.
template <class T>
struct NewArray {
    T* data;
    nb::object object;

    NewArray(std::size_t rows, std::size_t cols, T fill, bool is_matrix) {
        auto memory = std::make_unique<T[]>(rows * (is_matrix ? cols : 1) + 1);
        std::fill_n(memory.get(), rows * (is_matrix ? cols : 1), fill);
        data = memory.get();
        nb::capsule owner(memory.release(), [](void* it) noexcept { delete[] static_cast<T*>(it); });
        const std::size_t shape[] = {rows, cols};
        object = nb::cast(nb::ndarray<nb::numpy, T>(data, is_matrix ? 2 : 1, shape, owner));
    }
};

// RowResults in fresh arrays, as ops.RowResults has them.
struct NewResults {
    NewArray<std::int32_t> tokens;
    NewArray<float> logprobs;
    NewArray<std::int32_t> top_ids;
    NewArray<float> top_logprobs;
    RowResults rows;

    NewResults(std::size_t num_rows, int max_top)
        : tokens(num_rows, 0, -1, false),
          logprobs(num_rows, 0, 0.0f, false),
          top_ids(num_rows, std::size_t(max_top), -1, true),
          top_logprobs(num_rows, std::size_t(max_top), 0.0f, true),
          rows{tokens.data, logprobs.data, top_ids.data, top_logprobs.data, max_top} {}

    nb::tuple to_tuple() const {
        return nb::make_tuple(tokens.object, logprobs.object, top_ids.object, top_logprobs.object);
    }
};

// The columns of ops.SamplingRows, in their order. Their contents are find_problem()'s to check.
inline SamplingColumns view_sampling(const nb::tuple& columns) {
    if (nb::len(columns) != 18) throw nb::value_error("sampling must have the 18 columns of ops.SamplingRows");
    int at = 0;
    const auto ints = [&](const char* name) { return view<std::int32_t>(columns[at++], name); };
    const auto floats = [&](const char* name) { return view<float>(columns[at++], name); };
    SamplingColumns rows;
    rows.targets = ints("targets");
    rows.positions = ints("positions");
    rows.seeds = view<std::uint64_t>(columns[at++], "seeds");
    rows.choices = ints("choices");
    rows.temperature = floats("temperature");
    rows.top_k = ints("top_k");
    rows.top_p = floats("top_p");
    rows.min_p = floats("min_p");
    rows.repetition_penalty = floats("repetition_penalty");
    rows.presence_penalty = floats("presence_penalty");
    rows.frequency_penalty = floats("frequency_penalty");
    rows.num_top = ints("num_top");
    rows.bias_offsets = ints("bias_offsets");
    rows.bias_ids = ints("bias_ids");
    rows.bias_values = floats("bias_values");
    rows.history_offsets = ints("history_offsets");
    rows.history = ints("history");
    rows.num_prompt = ints("num_prompt");
    return rows;
}

inline int max_top(const SamplingColumns& rows) {
    int most = 0;
    for (const std::int32_t count : rows.num_top) most = std::max(most, int(count));
    return most;
}

inline const Kernels& kernels_named(const std::string& name) {
    for (const Isa isa : {Isa::avx512, Isa::avx2, Isa::neon, Isa::scalar}) {
        const Kernels* kernels = kernels_for(isa);
        if (kernels != nullptr && kernels->name == name) return *kernels;
    }
    throw nb::value_error(("no kernels for \"" + name + "\" in this build or on this processor").c_str());
}

inline Format format_named(const std::string& name) {
    for (const Format format : {Format::f32, Format::f16, Format::bf16, Format::q8_0, Format::q4_0, Format::q4_1}) {
        if (name == traits(format).name) return format;
    }
    throw nb::value_error(("no kernels for weights of format \"" + name + "\"").c_str());
}

inline void raise_if(const std::string& problem) {
    if (!problem.empty()) throw nb::value_error(problem.c_str());
}

}  // namespace headrace
