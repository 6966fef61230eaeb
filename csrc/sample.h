// The scalar half of the sampler: what touches few tokens, or moves keys about. The vector half, which walks the whole
// vocabulary, is kernels/sample.inc. Compiled once, without instruction-set flags: the standard library's algorithms
// would otherwise leave AVX-512 copies of themselves for the linker to pick.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace headrace {

// Logits of a row lie padded with -inf to whole groups of 64: one Philox counter per lane serves four vectors.
inline constexpr int kNoiseGroup = 4 * kLanes;

static inline int padded_vocab(int vocab) { return (vocab + kNoiseGroup - 1) / kNoiseGroup * kNoiseGroup; }

// A token's place in the ranking by descending z, then ascending id, as one integer: z <= 0, so its magnitude rises as
// z falls. Survivors of top_k, top_p and min_p are the keys up to a border.
using RankKey = std::uint64_t;

static inline RankKey rank_key(float z, std::uint32_t id) {
    return RankKey(std::bit_cast<std::uint32_t>(z) & 0x7fffffffu) << 32 | id;
}

// The working memory of one row. All [padded_vocab], kAlign-aligned.
struct SampleScratch {
    float* x;        // the logits under work, then z
    float* weights;  // exp(z)
    RankKey* keys;
    std::int32_t* counts;  // of the history's tokens; shares the keys' memory

    SampleScratch(std::byte* base, int vocab);
};

// NaN as -inf, +inf as the largest float. Denormals are flushed by the mode of the thread.
float clean_logit(float x);

// Adds the row's biases to x, which is clean before and after.
void add_biases(const SampleRow& row, float* x);

// Repetition, presence and frequency penalties, in time proportional to the history. Nothing is assumed of `counts`.
void penalize(const SampleRow& row, float* x, std::int32_t* counts);

// The smallest key such that the keys up to it weigh at least `mass`, which all together do; reorders them.
RankKey mass_key(RankKey* keys, int count, const float* weights, double mass);

}  // namespace headrace
