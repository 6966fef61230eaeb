// The sampler: each step of it alone, then together; drawn at several positions with several seeds.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "cases.h"
#include "inputs.h"

namespace headrace::conformance {
namespace {

constexpr int kDraws = 6;

struct Sampling {
    std::string name;
    int vocab = 0;
    float temperature = 1;
    float top_p = 1;
    float min_p = 0;
    int top_k = 0;
    float repetition_penalty = 1, presence_penalty = 0, frequency_penalty = 0;
    int num_top = 0;
    std::int32_t target = -1;
    bool has_bias = false, has_history = false, has_mask = false;
    void (*spoil)(Array<float>& logits) = nullptr;
};

Array<float> logits_of(const Sampling& it) {
    Array<float> logits = normal_floats(it.vocab, it.vocab);
    for (float& x : logits) x *= 3;
    if (it.spoil != nullptr) it.spoil(logits);
    return logits;
}

void make_ties(Array<float>& logits) {
    for (float& x : logits) x = std::nearbyint(x * 0.5f);
}

void damage(Array<float>& logits) {
    const float awkward[] = {NAN, INFINITY, -INFINITY, FLT_MAX, -FLT_MAX, NAN, -0.0f, INFINITY};
    std::copy(std::begin(awkward), std::end(awkward), logits.begin() + 20);
}

void forbid_all(Array<float>& logits) { std::fill(logits.begin(), logits.end(), -INFINITY); }

// Random columns of a row; only those that the sampling has are shown to the kernel.
struct Columns {
    Array<std::int32_t> bias_ids{5}, history{24};
    Array<float> bias_values = normal_floats(5, 5);
    Array<std::uint32_t> mask;

    explicit Columns(int vocab) : mask((vocab + 31) / 32) {
        Random random(vocab);
        for (std::int32_t& id : bias_ids) id = random.below(vocab);
        for (std::int32_t& id : history) id = random.below(std::min(vocab, 40));  // with repetitions
        for (std::uint32_t& word : mask) word = std::uint32_t(random.bits());
    }
};

Output sample(const Kernels& kernels, const Sampling& it) {
    const Array<float> logits = logits_of(it);
    const Columns columns(it.vocab);
    const Array<std::byte> scratch(sample_scratch_bytes(it.vocab));
    const std::size_t num_top = std::max(it.num_top, 0);
    Output output;
    for (int draw = 0; draw < kDraws; ++draw) {
        Array<std::int32_t> token(1), top_ids(num_top);
        Array<float> logprob(1), top_logprobs(num_top);
        kernels.sample({
            .logits = logits.data(),
            .vocab = it.vocab,
            .target = it.target,
            .position = 1000 * draw,
            .seed = 0x123456789abcdefu * draw,
            .choice = std::uint32_t(draw),
            .temperature = it.temperature,
            .top_p = it.top_p,
            .min_p = it.min_p,
            .top_k = it.top_k,
            .repetition_penalty = it.repetition_penalty,
            .presence_penalty = it.presence_penalty,
            .frequency_penalty = it.frequency_penalty,
            .num_top = it.num_top,
            .bias_ids = columns.bias_ids.data(),
            .bias_values = columns.bias_values.data(),
            .num_bias = it.has_bias ? int(columns.bias_ids.size()) : 0,
            .history = columns.history.data(),
            .num_history = it.has_history ? int(columns.history.size()) : 0,
            .num_prompt = 10,
            .mask = it.has_mask ? columns.mask.data() : nullptr,
            .scratch = scratch.data(),
            .token = token.data(),
            .logprob = logprob.data(),
            .top_ids = top_ids.data(),
            .top_logprobs = top_logprobs.data(),
        });
        output.add(token.all());
        output.add(logprob.all());
        output.add(top_ids.all());
        output.add(top_logprobs.all());
    }
    return output;
}

}  // namespace

void add_sample_cases(std::vector<Case>& cases) {
    std::vector<Sampling> samplings;
    for (const int vocab : {1, 63, 1000, 4133}) {
        const auto add = [&](Sampling it) {
            it.name = join({"sample", it.name, std::to_string(vocab)});
            it.vocab = vocab;
            samplings.push_back(std::move(it));
        };
        add({.name = "greedy", .temperature = 0});
        add({.name = "no_logprobs", .num_top = -1});
        add({.name = "temperature", .temperature = 0.75f, .num_top = 1});
        add({.name = "target", .num_top = 5, .target = vocab / 2});
        add({.name = "top_logprobs", .num_top = kMaxTop});
        add({.name = "top_k", .top_k = 7});
        add({.name = "top_p", .top_p = 0.8125f});
        add({.name = "min_p", .min_p = 0.0625f});
        add({.name = "bias", .has_bias = true});
        add({.name = "mask", .has_mask = true});
        add({.name = "penalties",
             .repetition_penalty = 1.25f,
             .presence_penalty = 0.5f,
             .frequency_penalty = 0.25f,
             .has_history = true});
        add({.name = "all",
             .temperature = 1.5f,
             .top_p = 0.9375f,
             .min_p = 0.015625f,
             .top_k = 50,
             .repetition_penalty = 0.75f,
             .presence_penalty = -0.5f,
             .num_top = 20,
             .has_bias = true,
             .has_history = true,
             .has_mask = true});
    }
    samplings.push_back(
        {.name = "sample/ties/1000", .vocab = 1000, .top_p = 0.5f, .top_k = 300, .num_top = 9, .spoil = make_ties});
    samplings.push_back({.name = "sample/damaged/100", .vocab = 100, .top_p = 0.9375f, .num_top = 9, .spoil = damage});
    samplings.push_back({.name = "sample/forbidden/100", .vocab = 100, .num_top = 3, .spoil = forbid_all});
    for (const Sampling& it : samplings) {
        cases.push_back({it.name, [it](const Kernels& kernels) { return sample(kernels, it); }});
    }
}

}  // namespace headrace::conformance
