#include "sample.h"

#include <algorithm>
#include <cfloat>
#include <cmath>

namespace headrace {
namespace {

double mass_of(const RankKey* keys, int count, const float* weights) {
    double mass = 0;
    for (int i = 0; i < count; ++i) mass += static_cast<double>(weights[static_cast<std::uint32_t>(keys[i])]);
    return mass;
}

}  // namespace

std::size_t sample_scratch_bytes(int vocab) {
    return std::size_t(padded_vocab(vocab)) * (2 * sizeof(float) + sizeof(RankKey));
}

SampleScratch::SampleScratch(std::byte* base, int vocab)
    : x(reinterpret_cast<float*>(base)),
      weights(x + padded_vocab(vocab)),
      keys(reinterpret_cast<RankKey*>(weights + padded_vocab(vocab))),
      counts(reinterpret_cast<std::int32_t*>(keys)) {}

float clean_logit(float x) { return std::isnan(x) ? -INFINITY : std::min(x, FLT_MAX); }

void add_biases(const SampleRow& row, float* x) {
    for (int i = 0; i < row.num_bias; ++i) {
        float& logit = x[row.bias_ids[i]];
        logit = clean_logit(logit + row.bias_values[i]);
    }
}

void penalize(const SampleRow& row, float* x, std::int32_t* counts) {
    constexpr std::int32_t kDone = -1;
    const float repetition = std::max(row.repetition_penalty, FLT_MIN);  // a flushed one would make 0 * -inf
    for (int i = 0; i < row.num_history; ++i) counts[row.history[i]] = 0;
    for (int i = row.num_prompt; i < row.num_history; ++i) ++counts[row.history[i]];
    for (int i = 0; i < row.num_history; ++i) {
        const std::int32_t id = row.history[i], count = counts[id];
        counts[id] = kDone;
        if (count == kDone) continue;
        float logit = x[id] > 0 ? x[id] / repetition : x[id] * repetition;
        if (count > 0) logit = logit - row.frequency_penalty * static_cast<float>(count) - row.presence_penalty;
        x[id] = clean_logit(logit);
    }
}

// Halves the range that the border lies in: linear in `count`, where sorting would not be.
RankKey mass_key(RankKey* keys, int count, const float* weights, double mass) {
    int begin = 0, end = count;  // the border is in [begin, end); `mass` is what is missing up to `begin`
    while (end - begin > 1) {
        const int middle = begin + (end - begin) / 2;
        std::nth_element(keys + begin, keys + middle, keys + end);
        const double below = mass_of(keys + begin, middle - begin, weights);
        if (below >= mass) {
            end = middle;
        } else {
            mass -= below;
            begin = middle;
        }
    }
    return keys[begin];
}

}  // namespace headrace
