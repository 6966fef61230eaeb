// One step's ragged arrays, as views of the caller's memory: ops.Batch, ops.SamplingRows and ops.RowResults in C++.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "kernels.h"

namespace headrace {

inline constexpr int kMaxKvGroups = 4;

using Ints = std::span<const std::int32_t>;
using Floats = std::span<const float>;

struct SamplingColumns {  // in the order of ops.SamplingRows
    Ints targets;
    Ints positions;
    std::span<const std::uint64_t> seeds;
    Ints choices;
    Floats temperature;
    Ints top_k;
    Floats top_p;
    Floats min_p;
    Floats repetition_penalty;
    Floats presence_penalty;
    Floats frequency_penalty;
    Ints num_top;
    Ints bias_offsets;
    Ints bias_ids;
    Floats bias_values;
    Ints history_offsets;
    Ints history;
    Ints num_prompt;

    int num_rows() const { return int(targets.size()); }
};

struct Batch {
    Ints tokens;
    Ints token_offsets;
    Ints starts;
    Ints row_tokens;
    std::array<Ints, kMaxKvGroups> block_offsets;
    std::array<Ints, kMaxKvGroups> blocks;
    int num_groups = 0;
    SamplingColumns sampling;
    std::span<const std::uint32_t> mask;  // empty: everything is allowed; else [R][ceil(vocab / 32)]

    int num_slices() const { return int(starts.size()); }
    int num_tokens() const { return int(tokens.size()); }
    int num_rows() const { return int(row_tokens.size()); }
};

struct RowResults {
    std::int32_t* tokens;
    float* logprobs;
    std::int32_t* top_ids;  // [R][max_top]
    float* top_logprobs;
    int max_top;
};

// Row `row` as the kernels take it; its logits and scratch are the caller's to add.
SampleRow sample_row(const SamplingColumns& rows, std::span<const std::uint32_t> mask, const RowResults& results,
                     int vocab, int row);

// What a program was built for. A batch outside of it is refused, whoever made it.
struct Bounds {
    int max_tokens;
    int max_rows;
    int max_seqs;
    int max_len;
    int vocab = 0;
    int num_groups = 0;
    std::array<int, kMaxKvGroups> num_blocks{};
};

// Row-wise columns, offsets, token ids and counts of the sampler: what is wrong first, or "".
std::string find_problem(const SamplingColumns& sampling, int vocab);
// The same for a whole batch: after it nothing that run() reads or writes through an index can be out of bounds.
std::string find_problem(const Batch& batch, const Bounds& bounds);

}  // namespace headrace
