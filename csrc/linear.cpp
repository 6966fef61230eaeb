// Matrix products: a claim is some tiles of one weight times some rows.
#include <algorithm>

#include "phases.h"

namespace headrace {
namespace {

// A claim streams at most so many bytes of weights: well inside L2, long beside the 100 ns that claiming costs.
constexpr std::size_t kClaimBytes = 64 << 10;
// Weight tiles that a kernel may have in flight at once for one row.
constexpr int kTilesAtOnce = 4;
// Rows of a claim: 128 rows of 8-bit activations stay in L2 while the claim's weights pass.
constexpr int kClaimRows = 128;
constexpr int kClaimsPerThread = 8;

struct Claims {
    int weight_tiles;
    int rows;
    int row_claims;

    int of(const Matrix& w) const { return (w.num_tiles() + weight_tiles - 1) / weight_tiles * row_claims; }
};

Claims claims(const Replay& replay, int num_rows, int all_weight_tiles, std::size_t tile_bytes) {
    const int row_claims = (num_rows + kClaimRows - 1) / kClaimRows;
    const int balanced = all_weight_tiles / (kClaimsPerThread * replay.num_threads);
    const int in_cache = int(kClaimBytes / tile_bytes);
    const int weight_tiles = std::max(std::min(balanced, in_cache) / kTilesAtOnce * kTilesAtOnce, kTilesAtOnce);
    return {weight_tiles, kClaimRows, row_claims};
}

// The most claims that a weight can be cut into.
std::size_t max_claims(const Matrix& w, int num_rows) {
    const std::size_t row_claims = (num_rows + kClaimRows - 1) / kClaimRows;
    return (w.num_tiles() + kTilesAtOnce - 1) / kTilesAtOnce * row_claims;
}

struct Target {
    float* out;
    std::size_t stride;
    const float* add;
    std::size_t add_stride;
};

// Claim `claim` of one weight: rows fastest, so that its tiles are read from memory once. `first_row` is where the
// activations begin; `target.out` already stands there.
void multiply(const Replay& replay, const Matrix& w, const Claims& cut, int claim, int first_row, int num_rows,
              const Target& target) {
    const int tile_begin = claim / cut.row_claims * cut.weight_tiles;
    const int tile_end = std::min(tile_begin + cut.weight_tiles, w.num_tiles());
    const int row = claim % cut.row_claims * cut.rows;
    const Act act = traits(w.format).act;
    const std::size_t act_stride = act_row_bytes(act, w.cols);
    replay.kernels->gemm(w, tile_begin, tile_end, replay.acts[int(act)] + (first_row + row) * act_stride, act_stride,
                         std::min(cut.rows, num_rows - row), target.out + row * target.stride, target.stride,
                         target.add == nullptr ? nullptr : target.add + row * target.add_stride, target.add_stride);
}

Claims claims(const Replay& replay, const Linear& linear) {
    int tiles = 0;
    std::size_t tile_bytes = 0;
    for (const auto& product : linear.products) {
        tiles += product.weight->matrix().num_tiles();
        tile_bytes = std::max(tile_bytes, product.weight->matrix().tile_bytes());
    }
    return claims(replay, replay.num_rows(linear.kind), tiles, tile_bytes);
}

// The head's present rows.
struct HeadRows {
    int first;
    int count;
};

HeadRows head_rows(const Replay& replay) {
    const int first = replay.round / 2 * replay.head_rows;
    return {first, std::min(replay.head_rows, replay.batch->num_rows() - first)};
}

Claims claims(const Replay& replay, const Head& head) {
    const Matrix& w = head.weight->matrix();
    return claims(replay, head_rows(replay).count, w.num_tiles(), w.tile_bytes());
}

void sample(const Replay& replay, int vocab, int row, float* logits, std::byte* scratch) {
    SampleRow it = sample_row(replay.batch->sampling, replay.batch->mask, *replay.results, vocab, row);
    it.logits = logits;
    it.scratch = scratch;
    replay.kernels->sample(it);
}

}  // namespace

std::size_t Linear::max_tiles(const Bounds& bounds) const {
    std::size_t count = 0;
    for (const Product& product : products) count += max_claims(product.weight->matrix(), max_rows(bounds, kind));
    return count;
}

int Linear::tiles(const Replay& replay) const {
    const Claims cut = claims(replay, *this);
    int count = 0;
    for (const Product& product : products) count += cut.of(product.weight->matrix());
    return count;
}

void Linear::run(const Replay& replay, int tile, int) const {
    const Claims cut = claims(replay, *this);
    auto product = products.begin();
    for (; tile >= cut.of(product->weight->matrix()); ++product) tile -= cut.of(product->weight->matrix());
    const bool has_add = add.has_value() && product == products.begin();
    multiply(replay, product->weight->matrix(), cut, tile, 0, replay.num_rows(kind),
             {product->out.row(replay, 0), std::size_t(product->out.width), has_add ? add->row(replay, 0) : nullptr,
              has_add ? std::size_t(add->width) : 0});
}

std::size_t Head::max_tiles(const Bounds& bounds) const {
    return std::max(max_claims(weight->matrix(), bounds.max_rows), std::size_t(bounds.max_rows));
}

int Head::rounds(const Replay& replay) const {
    return 2 * ((replay.batch->num_rows() + replay.head_rows - 1) / replay.head_rows);
}

int Head::tiles(const Replay& replay) const {
    const bool is_sampling = replay.round % 2 == 1;
    return is_sampling ? head_rows(replay).count : claims(replay, *this).of(weight->matrix());
}

void Head::run(const Replay& replay, int tile, int thread) const {
    const Matrix& w = weight->matrix();
    const HeadRows rows = head_rows(replay);
    if (replay.round % 2 == 1) {
        sample(replay, w.rows, rows.first + tile, replay.logits + std::size_t(tile) * w.rows,
               replay.sample_scratch + thread * replay.sample_scratch_bytes);
        return;
    }
    const Claims cut = claims(replay, *this);
    const std::size_t stride = w.rows;
    multiply(replay, w, cut, tile, rows.first, rows.count, {replay.logits, stride, nullptr, 0});
    // The claim's weights are in the cache by now.
    if (rest_row) {
        multiply(replay, w, cut, tile, *rest_row + rows.first, rows.count,
                 {replay.logits, stride, replay.logits, stride});
    }
}

}  // namespace headrace
