// The border between the program (which splits a step into tiles and hands them to threads) and the kernels (which
// compute one tile on one thread). csrc/isa.cpp fills a Kernels table once per instruction set; dispatch.cpp picks one.
//
// Rules that make a row's bits independent of everything but the row:
//   - built with -ffp-contract=off; a fused multiply-add only where fma() is written
//   - one order over k for 1 row and for 512; remainders by masks or zero padding, never by another loop
//   - K and V are read as stored, in tiles anchored at position 0 of the sequence
// Kernels never allocate, throw, lock or call each other through the table.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headrace {

inline constexpr int kLanes = 16;           // f32 lanes of a vector = outputs of a weight tile
inline constexpr int kGroup = 32;           // inputs that share a scale
inline constexpr int kBlockTokens = 16;     // tokens of a KV block: one vector of scores
inline constexpr int kTileTokens = 64;      // tokens of an online-softmax step, anchored at position 0
inline constexpr int kSegmentTokens = 256;  // fixed split of a context: a multiple of kTileTokens
inline constexpr int kMaxHeadDim = 256;
// Scores may exceed what they are weighed against by so much, in units of ln 2, before all sums are scaled down: a
// weight is at most 2^8, sums in f32 do not mind, and after the first tile of a segment almost no tile has to.
inline constexpr float kHeadroom = 8.0f;
// The head's 8-bit inputs have a second term for the tokens so near, in nats, to a row's greatest logit by the first.
inline constexpr float kContenderMargin = 3.0f;
// Where more tokens than that are so near, the margin is halved until they are few, so many times at most: logits that
// all lie close together decide little, and would cost as much as all the head's products, on one thread.
inline constexpr int kMaxContenders = 128;
inline constexpr int kMarginHalvings = 6;
inline constexpr int kMaxTop = 64;        // top-N logprobs of a row (types.MAX_LOGPROBS)
inline constexpr std::size_t kLine = 64;  // of a cache
inline constexpr std::size_t kAlign = 64;
constexpr std::size_t align_up(std::size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

enum class Format : std::uint8_t { f32, f16, bf16, q8_0, q4_0, q4_1 };
enum class Act : std::uint8_t { f32, bf16, q8 };  // the form in which a weight format wants its inputs
enum class KvType : std::uint8_t { bf16, f32 };

// One row per weight format. `file_*`: as it lies in model files. `tile_group_bytes`: 16 outputs x 32 inputs, packed.
struct FormatTraits {
    const char* name;
    Act act;
    int file_block_values;
    int file_block_bytes;
    std::size_t tile_group_bytes;
};
const FormatTraits& traits(Format format);  // formats.cpp

// A weight [rows, cols] packed in tiles of 16 rows; each tile holds its groups of 32 inputs one after another. Rows and
// columns past the end are zeros.
struct Matrix {
    Format format;
    int rows;
    int cols;
    const std::byte* tiles;
    // Weights that a step reads once and no cache can keep until the next: few rows then read them past the outer
    // caches, which keep what can stay there.
    bool is_passing = false;

    int num_tiles() const { return (rows + kLanes - 1) / kLanes; }
    int num_groups() const { return (cols + kGroup - 1) / kGroup; }
    std::size_t tile_bytes() const { return num_groups() * traits(format).tile_group_bytes; }
    std::size_t bytes() const { return num_tiles() * tile_bytes(); }
};

// Bytes of one row of activations in form `act`, a multiple of kAlign. q8: per group the int8 values, their f32 scale
// and what the offset of unsigned weights needs (the integer sum, and scale * sum).
inline constexpr std::size_t kQ8GroupBytes = kGroup + 12;
std::size_t act_row_bytes(Act act, int cols);  // formats.cpp

// Cache lines [line, end_line) of the blocks `blocks`, of block_lines lines each: what a later phase reads.
struct BlockLines {
    const std::byte* base = nullptr;
    std::size_t block_stride = 0;  // bytes
    int block_lines = 1;
    const std::int32_t* blocks = nullptr;
    int line = 0;
    int end_line = 0;
};

// out[m][o] = (add ? add[m][o] : 0) + sum_k w[o][k] * x[m][k] for the outputs o of tiles [tile_begin, tile_end) that
// exist. The sum over k is complete before `add` joins, so that fusing a residual changes no bit; `add` may be `out`.
struct Gemm {
    const Matrix* w;
    int tile_begin = 0;
    int tile_end = 0;
    const std::byte* acts;   // rows in the format's activation form
    std::size_t act_stride;  // bytes
    int num_rows = 0;
    float* out = nullptr;
    std::size_t out_stride = 0;  // floats
    const float* add = nullptr;
    std::size_t add_stride = 0;
    BlockLines later = {};  // fetched beside the arithmetic of many rows
};

// The KV of one layer: where block b keeps the keys and values of head h, in the layouts that attend() streams.
//   keys    [head_dim / w][kBlockTokens][w]     w = 2 for bf16 (pairs of dimensions), 1 for f32
//   values  [kBlockTokens / w][head_dim][w]     (pairs of tokens)
struct KvLayer {
    KvType type;
    int num_kv_heads;
    int head_dim;
    std::byte* base;           // of this layer
    std::size_t block_stride;  // bytes from one block to the next within the layer

    std::size_t plane_bytes() const {  // keys, or values, of one head in one block
        return std::size_t(kBlockTokens) * head_dim * (type == KvType::bf16 ? 2 : 4);
    }
    std::byte* keys(int block, int head) const { return base + block * block_stride + 2 * head * plane_bytes(); }
    std::byte* values(int block, int head) const { return keys(block, head) + plane_bytes(); }
};

// One query token: its heads of one KV head, and where their states over a segment go. States are flash-attention's:
// a maximum (of scores in units of ln 2; later ones exceed it by kHeadroom at most), sum, and weighted values,
// unnormalized.
struct AttendQuery {
    const float* heads;  // [heads_per_kv][head_dim], rotated, unscaled
    int position;        // sees positions up to its own
    float* out_max;      // [heads_per_kv]
    float* out_sum;
    float* out_acc;  // [heads_per_kv][head_dim]
};

// Attention of query tokens over positions [segment * kSegmentTokens, ...), for the query heads of one KV head. The
// tokens may be of several sequences, if those keep what the tokens see of the segment in the same blocks.
struct Attend {
    const KvLayer* kv;
    const std::int32_t* blocks;       // from the segment's first on
    int num_blocks;                   // that hold what the tokens see
    const std::int32_t* next_blocks;  // what this thread reads next: fetched while these are computed
    int num_next_blocks;              // may be 0
    int next_kv_head;
    int kv_head;
    int heads_per_kv;
    const AttendQuery* queries;
    int num_queries;
    int segment;
    float scale;
};

// One logit row: scoring, penalties, drawing and top-N. Random numbers are Philox4x32-10 of (seed, choice) at
// (position, token id); a token is drawn by the exponential race, so it is a function of the logits and the key alone.
struct SampleRow {
    const float* logits;  // [vocab], raw
    int vocab;
    std::int32_t target;  // >= 0: score this token; -1: draw one
    std::int32_t position;
    std::uint64_t seed;
    std::uint32_t choice;
    float temperature, top_p, min_p;
    std::int32_t top_k;
    float repetition_penalty, presence_penalty, frequency_penalty;
    std::int32_t num_top;  // -1: no logprobs
    const std::int32_t* bias_ids;
    const float* bias_values;
    int num_bias;
    const std::int32_t* history;  // every token before the row's, the prompt's `num_prompt` first
    int num_history;
    int num_prompt;
    const std::uint32_t* mask;  // bit t of word t / 32: token t is allowed; null: all are
    std::byte* scratch;         // sample_scratch_bytes(vocab), kAlign-aligned
    // results
    std::int32_t* token;
    float* logprob;
    std::int32_t* top_ids;  // [num_top]
    float* top_logprobs;
};
std::size_t sample_scratch_bytes(int vocab);  // sample.cpp

struct Kernels {
    const char* name;  // "scalar", "avx2", "avx512", "neon"

    // Packs tile `tile` of a matrix from its rows as they lie in the file (`source` is the whole matrix).
    void (*pack_tile)(const Matrix& shape, int tile, const std::byte* source, std::byte* destination);
    // Row `row`, decoded exactly: [cols] f32.
    void (*unpack_row)(const Matrix& w, int row, float* out);
    // One row [cols] f32 into activation form; pads to whole groups with zeros.
    // `rest`, for q8 alone: null, or the row in which what rounding left over goes, quantized again; x is then the sum
    // of both to 15 bits.
    void (*quantize_row)(Act act, const float* x, int cols, std::byte* out, std::byte* rest);
    // The same for a row that nobody else reads: rms_norm's, silu_mul's.
    void (*quantize_norm)(Act act, const float* x, const float* weight, int cols, float eps, std::byte* out,
                          std::byte* rest);
    void (*quantize_gated)(Act act, const float* gate, const float* up, int cols, std::byte* out, std::byte* rest);
    void (*gemm)(const Gemm& args);

    void (*rms_norm)(const float* x, const float* weight, int width, float eps, float* out);
    void (*silu_mul)(const float* gate, const float* up, int width, float* out);
    void (*add)(const float* x, const float* y, int width, float* out);
    // [pairs] each, of angles of `turns` quarter turns per position.
    void (*rotary_angles)(const double* turns, int pairs, int position, float magnitude, float* cosines, float* sines);
    // num_heads heads of head_dim, pairs (i, i + rotary_pairs) for i < rotary_pairs; in place allowed.
    void (*rotate)(const float* x, int num_heads, int head_dim, int rotary_pairs, const float* cosines,
                   const float* sines, float* out);
    // Keys and values [num_kv_heads * head_dim] f32 of one token into slot `slot` of block `block`.
    void (*store_kv)(const KvLayer& kv, int block, int slot, const float* keys, const float* values);
    void (*attend)(const Attend& args);
    // Folds the states of `num_segments` segments, in order, into one output row of head_dim floats. States of segment
    // s start at max/sum + s * state_stride and acc + s * acc_stride (strides in floats).
    void (*merge)(const float* max, const float* sum, std::size_t state_stride, const float* acc,
                  std::size_t acc_stride, int num_segments, int head_dim, float* out);
    // The tokens whose logits are at most `margin` below the greatest, in order; returns how many. Where they are more
    // than `most`, those within half of it, and so on, kMarginHalvings times; and none if those are too many still.
    int (*find_contenders)(const float* logits, int vocab, float margin, int most, std::int32_t* tokens);
    void (*sample)(const SampleRow& row);
};

enum class Isa : std::uint8_t { scalar, avx2, avx512, neon };
// Null where the build or the processor (cpuid and XCR0) lacks it.
const Kernels* kernels_for(Isa isa);

}  // namespace headrace
