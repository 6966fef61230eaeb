// Arrays at the border to Python: checked views of what comes in, fresh arrays for what goes out.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

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

// Views that are kept for as long as the same arrays come again: a decode step takes over most of the arrays of the one
// before, and beside kernels that pass a model through the caches each look at an array is a look at memory.
class KeptViews {
public:
    // The view of `object`, which comes in `slot`: always of T.
    template <class T>
    std::span<const T> of(std::size_t slot, nb::handle object, const char* name) {
        if (slot >= slots_.size()) slots_.resize(slot + 1);
        Slot& kept = slots_[slot];
        if (!object.is(kept.array)) {
            const std::span<const T> fresh = view<T>(object, name);
            kept = {nb::borrow(object), fresh.data(), fresh.size()};
        }
        return {static_cast<const T*>(kept.data), kept.size};
    }

private:
    struct Slot {
        nb::object array;  // held: another one cannot come to lie where it was
        const void* data = nullptr;
        std::size_t size = 0;
    };
    std::vector<Slot> slots_;
};

// What a step gives, as ops.RowResults has it.
class NewResults {
public:
    explicit NewResults(const SamplingColumns& sampling) : tokens_(sampling.num_rows(), -1) {
        int most = -1;
        for (const std::int32_t count : sampling.num_top) most = std::max(most, int(count));
        if (most >= 0) {
            scores_.emplace(tokens_.size(), std::size_t(most));
        } else {
            unread_.resize(tokens_.size());
        }
        rows_ = {.tokens = tokens_.data(),
                 .logprobs = scores_ ? scores_->logprobs.data : unread_.data(),
                 .top_ids = scores_ ? scores_->top_ids.data : nullptr,
                 .top_logprobs = scores_ ? scores_->top_logprobs.data : nullptr,
                 .max_top = std::max(most, 0)};
    }

    const RowResults& rows() const { return rows_; }

    nb::tuple to_tuple() const {
        nb::list tokens;
        for (const std::int32_t token : tokens_) tokens.append(token);
        if (!scores_) return nb::make_tuple(tokens, nb::none());
        return nb::make_tuple(
            tokens, nb::make_tuple(scores_->logprobs.object, scores_->top_ids.object, scores_->top_logprobs.object));
    }

private:
    struct Scores {  // ops.RowScores
        NewArray<float> logprobs;
        NewArray<std::int32_t> top_ids;
        NewArray<float> top_logprobs;

        Scores(std::size_t num_rows, std::size_t num_top)
            : logprobs(num_rows, 0, 0.0f, false),
              top_ids(num_rows, num_top, -1, true),
              top_logprobs(num_rows, num_top, 0.0f, true) {}
    };

    std::vector<std::int32_t> tokens_;
    std::optional<Scores> scores_;  // none: no row wants any
    std::vector<float> unread_;     // where the kernels write logprobs then
    RowResults rows_;
};

// The columns of ops.SamplingRows, in their order. Their contents are find_problem()'s to check.
inline constexpr std::size_t kNumSamplingColumns = 18;

inline SamplingColumns view_sampling(KeptViews& views, const nb::tuple& columns) {
    if (nb::len(columns) != kNumSamplingColumns) {
        throw nb::value_error("sampling must have the 18 columns of ops.SamplingRows");
    }
    std::size_t at = 0;
    const auto next = [&]<class T>(std::span<const T>& out, const char* name) {
        out = views.of<T>(at, columns[at], name);
        ++at;
    };
    SamplingColumns rows;
    next(rows.targets, "targets");
    next(rows.positions, "positions");
    next(rows.seeds, "seeds");
    next(rows.choices, "choices");
    next(rows.temperature, "temperature");
    next(rows.top_k, "top_k");
    next(rows.top_p, "top_p");
    next(rows.min_p, "min_p");
    next(rows.repetition_penalty, "repetition_penalty");
    next(rows.presence_penalty, "presence_penalty");
    next(rows.frequency_penalty, "frequency_penalty");
    next(rows.num_top, "num_top");
    next(rows.bias_offsets, "bias_offsets");
    next(rows.bias_ids, "bias_ids");
    next(rows.bias_values, "bias_values");
    next(rows.history_offsets, "history_offsets");
    next(rows.history, "history");
    next(rows.num_prompt, "num_prompt");
    return rows;
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
