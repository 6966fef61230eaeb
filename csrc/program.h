// A forward pass, recorded once and replayed each step.
//
// Recording takes no memory: sizes follow by arithmetic, so that they can be refused first; allocate() takes all that a
// step can need, and run() takes nothing. Row operations that follow each other share a phase; between phases is a
// barrier. Whoever lays out the arena must give no buffer's floats to another before the phase that last reads it ends.
#pragma once

#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "batch.h"
#include "memory.h"
#include "phases.h"
#include "threads.h"

namespace headrace {

// Seconds that runs have taken since profiling began, all rounds of all phases of a kind together.
struct Profile {
    std::array<double, std::variant_size_v<Phase>> phases = {};  // in the order of Phase's alternatives
    double total = 0;                                            // what is before and after the phases included
};

class Program {
public:
    Program(std::shared_ptr<ThreadPool> pool, const Kernels& kernels, const Bounds& bounds)
        : pool_(std::move(pool)), bounds_(bounds), replay_{.kernels = &kernels, .num_threads = pool_->num_threads()} {}

    // Recording. Shapes are checked by throwing std::invalid_argument.
    using WeightRef = std::shared_ptr<const Weight>;
    void embed(std::size_t out, WeightRef table);
    // rms_norm and silu_mul without `out`, and the linear or head that follows without `x`: one reader, which has the
    // rows computed where it quantizes them.
    using Place = std::optional<std::size_t>;
    void rms_norm(Place out, std::size_t x, std::vector<float> weight, float eps, RowKind kind);
    void linear(const std::vector<std::size_t>& outs, Place x, const std::vector<WeightRef>& weights, Place add,
                RowKind kind);
    void rotate(std::size_t out, std::size_t x, int width, int head_dim, const std::vector<double>& frequencies,
                double magnitude);
    struct AttentionSite {
        std::shared_ptr<const KvCache> cache;
        int group, layer;
        int num_heads;
        float scale;
    };
    void attention(std::size_t out, std::size_t q, std::size_t k, std::size_t v, const AttentionSite& site);
    void silu_mul(Place out, std::size_t gate, std::size_t up, int width, RowKind kind);
    void add(std::size_t out, std::size_t x, std::size_t y, int width, RowKind kind);
    void select_rows(std::size_t out, std::size_t x, int width);
    void head(Place x, WeightRef weight);

    std::size_t arena_nbytes() const { return arena_floats_ * sizeof(float); }
    // What a step needs beside the arena: quantized inputs, rotary tables, attention states, logits, the sampler's own.
    std::size_t scratch_nbytes() const;
    // The most tiles that a phase of any step may have; the pool counts to ThreadPool::kMaxTiles.
    std::size_t max_tiles() const;
    // Ends recording and takes the memory.
    void allocate();

    Bounds bounds() const;
    // Why a step can't run now, or "".
    std::string find_obstacle();
    // `batch` has passed find_problem(). Blocks until done; one run at a time.
    // `meanwhile` is called on this thread while the others compute; it must not throw.
    void run(const Batch& batch, const RowResults& results, const std::function<void()>& meanwhile = nullptr);

    // Starts at zero. Costs a reading of the clock per phase; nothing until it is asked for.
    void start_profile() { profile_.emplace(); }
    std::optional<Profile> profile() const { return profile_; }

private:
    using Clock = std::chrono::steady_clock;
    struct Sizes {
        std::size_t acts[kNumActs], rotary, split_states, split_acc, thread_states, thread_acc, logits, sample;
    };
    struct Unstored {
        Input rows;
        int width;
        RowKind kind;
    };
    struct Tables {
        std::vector<double> frequencies;
        double magnitude;
        RotaryTable table;
    };

    Buffer buffer(std::size_t offset, int width, RowKind kind);
    void append(RowKind kind, RowOp op);
    void append_phase(Phase phase) { phases_.push_back(std::move(phase)); }
    void leave_unstored(Unstored rows);
    void fetch_beside_products();
    Input input(Place x, int width, RowKind kind);
    void quantize(const Input& x, const std::vector<WeightRef>& weights, RowKind kind, std::optional<int> rest_row);
    void check_recording() const;
    Sizes sizes() const;
    int head_rows() const;
    void bind(const Batch& batch, const RowResults& results);
    std::size_t later_blocks(int group) const;
    int open();
    // The weights that `thread` will read first after the present phase, where its rows are few (linear.cpp).
    std::span<const std::byte> ahead(int thread) const;
    void lap();

    std::shared_ptr<ThreadPool> pool_;
    Bounds bounds_;
    Replay replay_;
    std::vector<Phase> phases_;
    const std::function<void()>* meanwhile_ = nullptr;  // of the present run
    std::vector<Tables> rotary_;
    std::optional<Unstored> unstored_;  // rows that the next linear or head takes
    std::vector<WeightRef> weights_;
    std::vector<std::shared_ptr<const KvCache>> caches_;
    std::size_t arena_floats_ = 0;
    std::size_t rotary_floats_ = 0;
    std::size_t act_bytes_[kNumActs] = {};
    int num_heads_ = 1, heads_per_kv_ = 1, head_dim_ = 0, num_kv_heads_ = 1;  // the largest of all layers; the fewest
    bool has_head_ = false;
    bool is_filled_ = false;  // all weights are packed and all KV groups have memory
    Memory arena_, scratch_;
    std::size_t next_phase_ = 0;
    std::optional<Profile> profile_;
    Clock::time_point lap_ = {};  // when the present phase was opened, while profiling
    std::mutex run_mutex_;
};

}  // namespace headrace
