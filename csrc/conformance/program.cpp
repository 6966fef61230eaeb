// A whole small model, recorded and replayed: two sequences, one in two segments of context, prefilled in chunks,
// decoded together and verified; with 1, 2 and 3 threads, which must not change a bit.
#include "../program.h"

#include <stdexcept>

#include "cases.h"
#include "inputs.h"

namespace headrace::conformance {
namespace {

constexpr int kVocab = 150, kWidth = 64, kHidden = 96, kLayers = 2;
constexpr int kHeads = 4, kKvHeads = 2, kHeadDim = 16;
constexpr int kMaxTokens = 128, kMaxRows = 6, kMaxSeqs = 2, kMaxLen = 600;
constexpr int kTop = 3;
constexpr float kEpsilon = 0x1p-17f;

struct Model {
    std::string name;
    Format format;
    KvType kv;
};

// Buffers of the arena, one after another.
class Arena {
public:
    std::size_t take(int width) {
        const std::size_t offset = next_;
        next_ += std::size_t(kMaxTokens) * width;
        return offset;
    }

private:
    std::size_t next_ = 0;
};

std::vector<float> norm_weight(std::uint64_t seed) {
    std::vector<float> weight(kWidth);
    Random random(seed);
    for (float& x : weight) x = 1 + random.uniform() * 0.25f;
    return weight;
}

std::vector<double> rotary_frequencies() {  // powers of 1/4: no pow(), whose last bit is the library's
    std::vector<double> frequencies(kHeadDim / 2, 1.0);
    for (std::size_t i = 1; i < frequencies.size(); ++i) frequencies[i] = frequencies[i - 1] * 0.25;
    return frequencies;
}

class TinyLlama {
public:
    TinyLlama(const Kernels& kernels, const Model& model, int num_threads)
        : kernels_(kernels),
          model_(model),
          pool_(std::make_shared<ThreadPool>(num_threads)),
          cache_(std::make_shared<KvCache>(model.kv, kLayers, kKvHeads, kHeadDim)),
          program_(pool_, kernels, {kMaxTokens, kMaxRows, kMaxSeqs, kMaxLen}) {
        record();
        pack();
        program_.allocate();
        cache_->allocate(2 * ((kMaxLen + kBlockTokens - 1) / kBlockTokens));
    }

    Program& program() { return program_; }

private:
    Program::WeightRef weight(int rows, int cols) {
        weights_.push_back(std::make_shared<Weight>(kernels_, model_.format, rows, cols));
        return weights_.back();
    }

    void pack() {
        Weight::place_together(weights_);
        for (std::size_t i = 0; i < weights_.size(); ++i) {
            const Matrix& it = weights_[i]->matrix();
            const Array<std::byte> source = file_weight(it.format, it.rows, it.cols, i + 1);
            weights_[i]->pack(*pool_, source.data());
        }
    }

    void record() {
        Arena arena;
        const std::size_t x = arena.take(kWidth), normed = arena.take(kWidth);
        const auto embedding = weight(kVocab, kWidth);
        program_.embed(x, embedding);
        for (int layer = 0; layer < kLayers; ++layer) {
            program_.rms_norm(normed, x, norm_weight(2 * layer), kEpsilon, RowKind::tokens);
            attend(arena, x, normed, layer);
            program_.rms_norm(normed, x, norm_weight(2 * layer + 1), kEpsilon, RowKind::tokens);
            feed_forward(arena, x, normed);
        }
        const std::size_t last = arena.take(kWidth);
        program_.select_rows(last, x, kWidth);
        program_.rms_norm(last, last, norm_weight(99), kEpsilon, RowKind::logits);
        program_.head(last, embedding);
    }

    void attend(Arena& arena, std::size_t x, std::size_t normed, int layer) {
        const int q_width = kHeads * kHeadDim, kv_width = kKvHeads * kHeadDim;
        const std::size_t q = arena.take(q_width), k = arena.take(kv_width), v = arena.take(kv_width);
        const std::size_t attended = arena.take(q_width);
        program_.linear({q, k, v}, normed,
                        {weight(q_width, kWidth), weight(kv_width, kWidth), weight(kv_width, kWidth)}, std::nullopt,
                        RowKind::tokens);
        program_.rotate(q, q, q_width, kHeadDim, rotary_frequencies(), 1.0);
        program_.rotate(k, k, kv_width, kHeadDim, rotary_frequencies(), 1.0);
        program_.attention(attended, q, k, v, {cache_, 0, layer, kHeads, 0.25f});
        program_.linear({x}, attended, {weight(kWidth, q_width)}, x, RowKind::tokens);
    }

    void feed_forward(Arena& arena, std::size_t x, std::size_t normed) {
        const std::size_t gate = arena.take(kHidden), up = arena.take(kHidden);
        program_.linear({gate, up}, normed, {weight(kHidden, kWidth), weight(kHidden, kWidth)}, std::nullopt,
                        RowKind::tokens);
        program_.silu_mul(gate, gate, up, kHidden, RowKind::tokens);
        program_.linear({x}, gate, {weight(kWidth, kHidden)}, x, RowKind::tokens);
    }

    const Kernels& kernels_;
    Model model_;
    std::shared_ptr<ThreadPool> pool_;
    std::shared_ptr<KvCache> cache_;
    Program program_;
    std::vector<std::shared_ptr<Weight>> weights_;
};

// What a step feeds of a sequence: `count` tokens, of which the last `num_rows` get logits.
struct Slice {
    int sequence, start, count, num_rows;
};
using Step = std::vector<Slice>;

const std::vector<Step>& script() {
    static const std::vector<Step> kSteps = {
        {{0, 0, 128, 0}},
        {{0, 128, 128, 0}},
        {{0, 256, 128, 1}},
        {{0, 384, 91, 0}, {1, 0, 37, 1}},
        {{0, 475, 60, 1}, {1, 37, 1, 1}},
        {{0, 535, 1, 1}, {1, 38, 1, 1}},
        {{1, 39, 1, 1}, {0, 536, 5, 5}},
        {{0, 541, 1, 1}},
    };
    return kSteps;
}

// The arrays of a step, and the results' memory.
struct StepArrays {
    std::vector<std::int32_t> tokens, token_offsets{0}, starts, row_tokens, block_offsets{0}, blocks;
    std::vector<std::int32_t> positions;

    explicit StepArrays(const Step& step) {
        for (const Slice& it : step) {
            Random random(1000 * it.sequence + it.start);
            for (int i = 0; i < it.count; ++i) tokens.push_back(random.below(kVocab));
            for (int i = it.count - it.num_rows; i < it.count; ++i) {
                row_tokens.push_back(token_offsets.back() + i);
                positions.push_back(it.start + i + 1);
            }
            token_offsets.push_back(std::int32_t(tokens.size()));
            starts.push_back(it.start);
            const int num_blocks = (it.start + it.count + kBlockTokens - 1) / kBlockTokens;
            for (int i = 0; i < num_blocks; ++i) blocks.push_back(2 * i + it.sequence);  // interleaved
            block_offsets.push_back(std::int32_t(blocks.size()));
        }
    }
};

// The sampler's columns: targets alternate with draws, unless all are targets.
struct SamplingArrays {
    std::vector<std::int32_t> targets, choices, top_k, num_top, num_prompt, empty_offsets;
    std::vector<std::uint64_t> seeds;
    std::vector<float> temperature, top_p, min_p, repetition_penalty, penalty;

    SamplingArrays(std::size_t rows, bool draws)
        : choices(rows, 0),
          top_k(rows, 40),
          num_top(rows, draws ? kTop : 0),
          num_prompt(rows, 0),
          empty_offsets(rows + 1, 0),
          seeds(rows, 7),
          temperature(rows, 0.75f),
          top_p(rows, 0.9375f),
          min_p(rows, 0.0f),
          repetition_penalty(rows, 1.0f),
          penalty(rows, 0.0f) {
        for (std::size_t row = 0; row < rows; ++row) targets.push_back(draws && row % 2 == 0 ? -1 : int(row));
    }
};

Batch batch_of(const StepArrays& step, const SamplingArrays& sampling) {
    Batch batch{.tokens = step.tokens,
                .token_offsets = step.token_offsets,
                .starts = step.starts,
                .row_tokens = step.row_tokens,
                .block_offsets = {step.block_offsets},
                .blocks = {step.blocks},
                .num_groups = 1,
                .sampling = {},
                .mask = {}};
    batch.sampling = {.targets = sampling.targets,
                      .positions = step.positions,
                      .seeds = sampling.seeds,
                      .choices = sampling.choices,
                      .temperature = sampling.temperature,
                      .top_k = sampling.top_k,
                      .top_p = sampling.top_p,
                      .min_p = sampling.min_p,
                      .repetition_penalty = sampling.repetition_penalty,
                      .presence_penalty = sampling.penalty,
                      .frequency_penalty = sampling.penalty,
                      .num_top = sampling.num_top,
                      .bias_offsets = sampling.empty_offsets,
                      .bias_ids = {},
                      .bias_values = {},
                      .history_offsets = sampling.empty_offsets,
                      .history = {},
                      .num_prompt = sampling.num_prompt};
    return batch;
}

void run_step(Program& program, const Step& step, bool draws, Output& output) {
    const StepArrays arrays(step);
    const SamplingArrays sampling(arrays.row_tokens.size(), draws);
    const Batch batch = batch_of(arrays, sampling);
    for (const std::string& problem : {program.find_obstacle(), find_problem(batch, program.bounds())}) {
        if (!problem.empty()) throw std::runtime_error(problem);
    }
    const std::size_t rows = arrays.row_tokens.size(), top = rows * (draws ? kTop : 0);
    Array<std::int32_t> tokens(rows), top_ids(top);
    Array<float> logprobs(rows), top_logprobs(top);
    int num_calls = 0;
    program.run(batch, {tokens.data(), logprobs.data(), top_ids.data(), top_logprobs.data(), draws ? kTop : 0},
                [&] { ++num_calls; });
    if (num_calls != 1) throw std::runtime_error("meanwhile was called " + std::to_string(num_calls) + " times");
    output.add(tokens.all());
    output.add(logprobs.all());
    output.add(top_ids.all());
    output.add(top_logprobs.all());
}

Output replay(const Kernels& kernels, const Model& model, int num_threads, bool draws) {
    TinyLlama llama(kernels, model, num_threads);
    Output output;
    for (const Step& step : script()) run_step(llama.program(), step, draws, output);
    return output;
}

Output replay_on_threads(const Kernels& kernels, const Model& model, bool draws) {
    const Output alone = replay(kernels, model, 1, draws);
    for (const int num_threads : {2, 3}) {
        const Output output = replay(kernels, model, num_threads, draws);
        for (std::size_t i = 0; i < alone.words().size(); ++i) {
            if (output.words()[i] == alone.words()[i]) continue;
            throw std::runtime_error("word " + std::to_string(i) + " with " + std::to_string(num_threads) +
                                     " threads differs from that with one");
        }
    }
    return alone;
}

// Inputs that lie at a border of bf16 may be rounded to either neighbour, 2^-8 of them apart: so may logits, which are
// below 32. Tokens are given.
std::vector<float> score_bounds() {
    std::vector<float> bounds;
    for (const Step& step : script()) {
        const std::size_t rows = StepArrays(step).row_tokens.size();
        bounds.insert(bounds.end(), rows, 0.0f);
        bounds.insert(bounds.end(), rows, 32 * 0x1p-8f);
    }
    return bounds;
}

}  // namespace

void add_program_cases(std::vector<Case>& cases) {
    for (const Model& it : {Model{"f32+f32", Format::f32, KvType::f32}, Model{"f16+f32", Format::f16, KvType::f32},
                            Model{"q8_0+f32", Format::q8_0, KvType::f32}, Model{"q4_0+f32", Format::q4_0, KvType::f32},
                            Model{"q4_1+f32", Format::q4_1, KvType::f32}}) {
        cases.push_back(
            {"program/" + it.name, [it](const Kernels& kernels) { return replay_on_threads(kernels, it, true); }});
    }
    // Given tokens are scored: what a draw gives has no bound.
    const Model bf16{"bf16+bf16", Format::bf16, KvType::bf16};
    cases.push_back({"program/" + bf16.name,
                     [bf16](const Kernels& kernels) { return replay_on_threads(kernels, bf16, false); },
                     [](const Kernels&) { return score_bounds(); }});
}

}  // namespace headrace::conformance
