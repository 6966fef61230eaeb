// The phases of a replay: each cuts its work into tiles and calls kernels on them. Buffers are offsets into the arena;
// the sizes of a step are bound when it runs. Every phase gives the same bits however it cuts.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "attention_plan.h"
#include "batch.h"
#include "kernels.h"
#include "weight.h"

namespace headrace {

enum class RowKind : std::uint8_t { tokens, logits };  // rows of the T tokens fed, or of the R that get logits
inline constexpr int kNumActs = 3;                     // values of Act
// Of a common L3 of 32 MiB: the logits that exist at once, and the keys and values that are fetched for an attention.
inline constexpr std::size_t kHeadBytes = 16u << 20;
inline constexpr std::size_t kLaterBytes = 16u << 20;
// So many rows wait for their weights; memory has no time for anything beside them.
inline constexpr int kFewRows = 8;

inline int max_rows(const Bounds& bounds, RowKind kind) {
    return kind == RowKind::tokens ? bounds.max_tokens : bounds.max_rows;
}

// Partial attention, [states] each: flash-attention's running maximum, sum and [head_dim] weighted values.
struct States {
    float* max;
    float* sum;
    float* acc;
};

// Everything that phases read while a step runs. Memory belongs to the Program.
struct Replay {
    const Kernels* kernels;
    int num_threads;
    float* arena = nullptr;
    std::byte* acts[kNumActs] = {};
    float* rotary = nullptr;  // tables of [T][2 * pairs]: cosines, then sines
    States split_states = {};
    std::vector<States> thread_states = {};
    float* logits = nullptr;
    int head_rows = 1;  // rows of `logits`
    std::byte* sample_scratch = nullptr;
    std::size_t sample_scratch_bytes = 0;  // of one thread

    std::vector<int> positions = {};  // [T]
    std::vector<int> token_slices = {};
    AttentionPlan attention = {};

    const Batch* batch = nullptr;
    const RowResults* results = nullptr;
    int round = 0;

    int num_rows(RowKind kind) const { return kind == RowKind::tokens ? batch->num_tokens() : batch->num_rows(); }
};

struct Buffer {
    std::size_t offset;  // floats
    int width;

    float* row(const Replay& replay, int row) const { return replay.arena + offset + std::size_t(row) * width; }
};

// Row operations: a row's result depends on that row alone, so consecutive ones share a phase ----------------------

struct Embed {
    Buffer out;
    std::shared_ptr<const Weight> table;
    void run(const Replay& replay, int row) const;
};
struct Norm {
    Buffer x;
    std::shared_ptr<const std::vector<float>> weight;
    float eps;
};
struct RmsNorm {
    Buffer out;
    Norm norm;
    void run(const Replay& replay, int row) const;
};
struct Gate {
    Buffer gate, up;
};
struct SiluMul {
    Buffer out;
    Gate gate;
    void run(const Replay& replay, int row) const;
};
// A linear's or head's input: a buffer, or a row that nobody else reads and that is therefore never stored.
using Input = std::variant<Buffer, Norm, Gate>;
struct Quantize {
    Input x;
    int width;
    Act act;
    std::optional<int> rest_row;  // of activations: where the rows of second terms begin
    void run(const Replay& replay, int row) const;
};
struct RotaryTable {
    std::size_t offset;  // floats
    int pairs;

    float* cosines(const Replay& replay, int row) const {
        return replay.rotary + offset + std::size_t(row) * 2 * pairs;
    }
    float* sines(const Replay& replay, int row) const { return cosines(replay, row) + pairs; }
};
struct FillRotary {
    RotaryTable table;
    std::vector<double> turns;  // quarter turns per position
    float magnitude;
    void run(const Replay& replay, int row) const;
};
struct Rotate {
    Buffer out, x;
    RotaryTable table;
    int head_dim;
    void run(const Replay& replay, int row) const;
};
struct StoreKv {
    Buffer keys, values;
    std::shared_ptr<const KvCache> cache;
    int group, layer;
    void run(const Replay& replay, int row) const;
};
struct Merge {  // of contexts that were split; else attention has merged already
    Buffer out;
    int num_heads;
    void run(const Replay& replay, int row) const;
};
struct Add {
    Buffer out, x, y;
    void run(const Replay& replay, int row) const;
};
struct SelectRows {
    Buffer out, x;
    void run(const Replay& replay, int row) const;
};
using RowOp = std::variant<Embed, RmsNorm, Quantize, FillRotary, Rotate, StoreKv, Merge, SiluMul, Add, SelectRows>;

// Phases -----------------------------------------------------------------------------------------------------------
//
// A phase runs `rounds` times, each time over `tiles` tiles; Replay::round says which. No step within the bounds gives
// it more than `max_tiles`.

struct Rows {
    RowKind kind;
    std::vector<RowOp> ops;

    std::size_t max_tiles(const Bounds& bounds) const { return max_rows(bounds, kind); }
    int rounds(const Replay&) const { return 1; }
    int tiles(const Replay& replay) const;
    void run(const Replay& replay, int tile, int thread) const;
    int rows_per_tile(const Replay& replay) const;
};

// Weight tiles cut into ranges that are claimed: each thread's tiles into as many, which it takes from the front.
class TileCuts {
public:
    TileCuts(int num_tiles, int num_threads);

    int num_ranges() const { return int(cuts_.size()) - 1; }
    int begin(int range) const { return cuts_[range]; }
    int end(int range) const { return cuts_[range + 1]; }
    int first_of(int thread) const { return cuts_[num_ranges() / num_threads_ * thread]; }

private:
    std::vector<int> cuts_;
    int num_threads_;
};

// The products of one input, already quantized, with several weights.
struct Linear {
    struct Product {
        std::shared_ptr<const Weight> weight;
        Buffer out;
    };
    Linear(RowKind kind, std::vector<Product> products, std::optional<Buffer> add, int num_threads);

    RowKind kind;
    std::vector<Product> products;
    std::optional<Buffer> add;  // joins the first product's sum
    // The keys and values that the attention after this phase reads, from `begin` to `end` of each thread's share:
    // memory has time for them beside the products of many rows.
    struct Later {
        std::shared_ptr<const KvCache> cache;
        int group, layer;
        double begin, end;
    };
    std::optional<Later> later;
    TileCuts cuts;  // of the weights' tiles, one weight's after the other's

    std::size_t max_tiles(const Bounds& bounds) const;
    int rounds(const Replay&) const { return 1; }
    int tiles(const Replay& replay) const;
    void run(const Replay& replay, int tile, int thread) const;
    int num_tiles() const;
    double work() const;  // of a row, in products of a tile and a group of inputs
    BlockLines later_of(const Replay& replay, int claim) const;
    // The weights that `thread` begins with, where its share is tiles, not rows; not all, what it may fetch while it
    // waits.
    std::span<const std::byte> first_weights(int thread) const;
};

struct Attention {
    Buffer out, q;
    std::shared_ptr<const KvCache> cache;
    int group, layer;
    int num_heads;
    float scale;

    std::size_t max_tiles(const Bounds& bounds) const;
    int rounds(const Replay&) const { return 1; }
    int tiles(const Replay& replay) const { return int(replay.attention.claims.size()) * cache->num_kv_heads(); }
    void run(const Replay& replay, int tile, int thread) const;

private:
    struct Upcoming {  // what a thread is likely to compute next
        const AttentionItem* item;
        int kv_head;
    };

    const AttentionClaim& claim_of(const Replay& replay, int tile) const;
    void run_item(const Replay& replay, const AttentionItem& item, const Upcoming& next, int kv_head, int thread) const;
    void merge_tile(const Replay& replay, const AttentionItem& item, int kv_head, int thread) const;
};

// Logits and sampling, some rows at a time: even rounds compute logits, odd ones draw from them.
// 8-bit inputs have a second term for the logits that may win: nothing after the head evens out what rounding does to
// them, and far below the greatest it decides nothing.
struct Head {
    Head(std::shared_ptr<const Weight> weight, std::optional<int> rest_row, int num_threads);

    std::shared_ptr<const Weight> weight;
    std::optional<int> rest_row;
    TileCuts cuts;

    std::size_t max_tiles(const Bounds& bounds) const;
    int rounds(const Replay& replay) const;
    int tiles(const Replay& replay) const;
    void run(const Replay& replay, int tile, int thread) const;
    std::span<const std::byte> first_weights(int thread) const;
};

using Phase = std::variant<Rows, Linear, Attention, Head>;

}  // namespace headrace
