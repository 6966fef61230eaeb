#include "batch.h"

#include <algorithm>

namespace headrace {
namespace {

using std::to_string;

std::string wrong_length(const char* name, std::size_t length, std::size_t expected) {
    return std::string(name) + " has " + to_string(length) + " entries, not " + to_string(expected);
}

// `low` <= every value < `high`.
std::string check_range(const char* name, Ints values, std::int64_t low, std::int64_t high) {
    for (std::size_t i = 0; i < values.size(); ++i) {
        if (values[i] < low || values[i] >= high) {
            return std::string(name) + "[" + to_string(i) + "] is " + to_string(values[i]) + ", outside of [" +
                   to_string(low) + ", " + to_string(high) + ")";
        }
    }
    return "";
}

// `count` + 1 offsets that begin at 0, never fall and end at `total`.
std::string check_offsets(const char* name, Ints offsets, std::size_t count, std::size_t total) {
    if (offsets.size() != count + 1) return wrong_length(name, offsets.size(), count + 1);
    if (offsets.front() != 0 || offsets.back() != std::int64_t(total)) {
        return std::string(name) + " must begin at 0 and end at " + to_string(total);
    }
    if (!std::is_sorted(offsets.begin(), offsets.end())) return std::string(name) + " falls";
    return "";
}

struct NamedLength {
    const char* name;
    std::size_t length;
};

std::string check_slices(const Batch& batch, const Bounds& bounds) {
    for (int s = 0; s < batch.num_slices(); ++s) {
        const int count = batch.token_offsets[s + 1] - batch.token_offsets[s];
        if (count == 0) return "slice " + to_string(s) + " feeds no token";
        if (batch.starts[s] < 0 || batch.starts[s] > bounds.max_len - count) {
            return "slice " + to_string(s) + " feeds " + to_string(count) + " tokens at position " +
                   to_string(batch.starts[s]) + "; sequences have at most " + to_string(bounds.max_len);
        }
    }
    return "";
}

std::string check_blocks(const Batch& batch, const Bounds& bounds, int group) {
    const Ints offsets = batch.block_offsets[group], blocks = batch.blocks[group];
    std::string problem = check_offsets("block_offsets", offsets, batch.num_slices(), blocks.size());
    if (!problem.empty()) return problem;
    for (int s = 0; s < batch.num_slices(); ++s) {
        const int end = batch.starts[s] + batch.token_offsets[s + 1] - batch.token_offsets[s];
        const int needed = (end + kBlockTokens - 1) / kBlockTokens;
        if (offsets[s + 1] - offsets[s] < needed) {
            return "slice " + to_string(s) + " has " + to_string(offsets[s + 1] - offsets[s]) + " blocks for " +
                   to_string(end) + " positions; it needs " + to_string(needed);
        }
        problem = check_range("blocks", blocks.subspan(offsets[s], needed), 0, bounds.num_blocks[group]);
        if (!problem.empty()) return problem;
    }
    return "";
}

}  // namespace

SampleRow sample_row(const SamplingColumns& rows, std::span<const std::uint32_t> mask, const RowResults& results,
                     int vocab, int row) {
    const std::size_t mask_words = (vocab + 31) / 32;
    const int bias = rows.bias_offsets[row], history = rows.history_offsets[row];
    return {
        .logits = nullptr,
        .vocab = vocab,
        .target = rows.targets[row],
        .position = rows.positions[row],
        .seed = rows.seeds[row],
        .choice = std::uint32_t(rows.choices[row]),
        .temperature = rows.temperature[row],
        .top_p = rows.top_p[row],
        .min_p = rows.min_p[row],
        .top_k = rows.top_k[row],
        .repetition_penalty = rows.repetition_penalty[row],
        .presence_penalty = rows.presence_penalty[row],
        .frequency_penalty = rows.frequency_penalty[row],
        .num_top = rows.num_top[row],
        .bias_ids = rows.bias_ids.data() + bias,
        .bias_values = rows.bias_values.data() + bias,
        .num_bias = rows.bias_offsets[row + 1] - bias,
        .history = rows.history.data() + history,
        .num_history = rows.history_offsets[row + 1] - history,
        .num_prompt = rows.num_prompt[row],
        .mask = mask.empty() ? nullptr : mask.data() + row * mask_words,
        .scratch = nullptr,
        .token = results.tokens + row,
        .logprob = results.logprobs + row,
        .top_ids = results.top_ids + std::size_t(row) * results.max_top,
        .top_logprobs = results.top_logprobs + std::size_t(row) * results.max_top,
    };
}

std::string find_problem(const SamplingColumns& rows, int vocab) {
    const std::size_t count = rows.targets.size();
    for (const auto& [name, length] : {
             NamedLength{"positions", rows.positions.size()},
             NamedLength{"seeds", rows.seeds.size()},
             NamedLength{"choices", rows.choices.size()},
             NamedLength{"temperature", rows.temperature.size()},
             NamedLength{"top_k", rows.top_k.size()},
             NamedLength{"top_p", rows.top_p.size()},
             NamedLength{"min_p", rows.min_p.size()},
             NamedLength{"repetition_penalty", rows.repetition_penalty.size()},
             NamedLength{"presence_penalty", rows.presence_penalty.size()},
             NamedLength{"frequency_penalty", rows.frequency_penalty.size()},
             NamedLength{"num_top", rows.num_top.size()},
             NamedLength{"num_prompt", rows.num_prompt.size()},
         }) {
        if (length != count) return wrong_length(name, length, count);
    }
    if (rows.bias_values.size() != rows.bias_ids.size()) {
        return wrong_length("bias_values", rows.bias_values.size(), rows.bias_ids.size());
    }
    for (const std::string& problem : {
             check_range("targets", rows.targets, -1, vocab),
             check_range("positions", rows.positions, 0, INT32_MAX),
             check_range("choices", rows.choices, 0, INT32_MAX),
             check_range("top_k", rows.top_k, 0, std::int64_t(INT32_MAX) + 1),
             check_range("num_top", rows.num_top, -1, kMaxTop + 1),
             check_offsets("bias_offsets", rows.bias_offsets, count, rows.bias_ids.size()),
             check_range("bias_ids", rows.bias_ids, 0, vocab),
             check_offsets("history_offsets", rows.history_offsets, count, rows.history.size()),
             check_range("history", rows.history, 0, vocab),
             check_range("num_prompt", rows.num_prompt, 0, INT32_MAX),
         }) {
        if (!problem.empty()) return problem;
    }
    return "";
}

std::string find_problem(const Batch& batch, const Bounds& bounds) {
    if (batch.num_tokens() > bounds.max_tokens) {
        return "the step feeds " + to_string(batch.num_tokens()) + " tokens, at most " + to_string(bounds.max_tokens) +
               " are allowed";
    }
    if (batch.num_slices() > bounds.max_seqs) {
        return "the step has " + to_string(batch.num_slices()) + " slices, at most " + to_string(bounds.max_seqs) +
               " are allowed";
    }
    if (batch.num_rows() > bounds.max_rows) {
        return "the step has " + to_string(batch.num_rows()) + " logit rows, at most " + to_string(bounds.max_rows) +
               " are allowed";
    }
    if (batch.sampling.targets.size() != batch.row_tokens.size()) {
        return wrong_length("targets", batch.sampling.targets.size(), batch.row_tokens.size());
    }
    const std::size_t mask_words = batch.row_tokens.size() * ((bounds.vocab + 31) / 32);
    if (!batch.mask.empty() && batch.mask.size() != mask_words) {
        return wrong_length("mask", batch.mask.size(), mask_words);
    }
    if (batch.num_groups != bounds.num_groups) {
        return wrong_length("blocks", batch.num_groups, bounds.num_groups);
    }
    for (const std::string& problem : {
             check_offsets("token_offsets", batch.token_offsets, batch.num_slices(), batch.tokens.size()),
             check_range("tokens", batch.tokens, 0, bounds.vocab),
             check_range("row_tokens", batch.row_tokens, 0, batch.num_tokens()),
             find_problem(batch.sampling, bounds.vocab),
         }) {
        if (!problem.empty()) return problem;
    }
    std::string problem = check_slices(batch, bounds);
    for (int group = 0; problem.empty() && group < batch.num_groups; ++group) {
        problem = check_blocks(batch, bounds, group);
    }
    return problem;
}

}  // namespace headrace
