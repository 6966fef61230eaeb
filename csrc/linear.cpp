// Matrix products: a claim is some tiles of one weight times some rows.
#include <algorithm>
#include <utility>

#include "phases.h"

namespace headrace {
namespace {

// Weight tiles that a kernel may have in flight at once for one row.
constexpr int kTilesAtOnce = 4;
// Rows of a claim: 128 rows of 8-bit activations stay in L2 while the claim's weights pass.
constexpr int kClaimRows = 128;

int row_claims(int num_rows) { return (num_rows + kClaimRows - 1) / kClaimRows; }

// Cuts weight tiles into ranges, [range, range + 1) of the result each, so that every thread streams long ones and all
// end together: a claim takes its share of half of what is left (guided self-scheduling, Polychronopoulos and Kuck
// 1987).
std::vector<int> cut_tiles(int num_tiles, int num_threads) {
    std::vector<int> cuts{0};
    while (cuts.back() < num_tiles) {
        const int share = (num_tiles - cuts.back()) / (2 * num_threads) / kTilesAtOnce * kTilesAtOnce;
        cuts.push_back(std::min(cuts.back() + std::max(share, kTilesAtOnce), num_tiles));
    }
    return cuts;
}

struct Target {
    float* out;
    std::size_t stride;
    const float* add;
    std::size_t add_stride;
};

struct Rectangle {  // of a product: weight tiles [tile, tile_end) by rows [row, row_end)
    int tile, tile_end;
    int row, row_end;
};

// `first_act`: the row of activations that row 0 of the product reads.
void multiply(const Replay& replay, const Matrix& w, const Rectangle& part, int first_act, const Target& target) {
    const Act act = traits(w.format).act;
    const std::size_t act_stride = act_row_bytes(act, w.cols), row = part.row;
    replay.kernels->gemm(w, part.tile, part.tile_end, replay.acts[int(act)] + (first_act + row) * act_stride,
                         act_stride, part.row_end - part.row, target.out + row * target.stride, target.stride,
                         target.add == nullptr ? nullptr : target.add + row * target.add_stride, target.add_stride);
}

// Claim `claim` of `num_rows` rows by the tiles of `cuts`: rows fastest, so that a range's tiles are read from memory
// once.
Rectangle rectangle(const std::vector<int>& cuts, int num_rows, int claim) {
    const int range = claim / row_claims(num_rows), row = claim % row_claims(num_rows) * kClaimRows;
    return {cuts[range], cuts[range + 1], row, std::min(row + kClaimRows, num_rows)};
}

int num_claims(const std::vector<int>& cuts, int num_rows) { return (int(cuts.size()) - 1) * row_claims(num_rows); }

// The head's present rows.
struct HeadRows {
    int first;
    int count;
};

HeadRows head_rows(const Replay& replay) {
    const int first = replay.round / 2 * replay.head_rows;
    return {first, std::min(replay.head_rows, replay.batch->num_rows() - first)};
}

void sample(const Replay& replay, int vocab, int row, float* logits, std::byte* scratch) {
    SampleRow it = sample_row(replay.batch->sampling, replay.batch->mask, *replay.results, vocab, row);
    it.logits = logits;
    it.scratch = scratch;
    replay.kernels->sample(it);
}

}  // namespace

Linear::Linear(RowKind kind, std::vector<Product> products, std::optional<Buffer> add, int num_threads)
    : kind(kind), products(std::move(products)), add(std::move(add)) {
    int num_tiles = 0;
    for (const Product& product : this->products) num_tiles += product.weight->matrix().num_tiles();
    cuts = cut_tiles(num_tiles, num_threads);
}

std::size_t Linear::max_tiles(const Bounds& bounds) const { return num_claims(cuts, max_rows(bounds, kind)); }

int Linear::tiles(const Replay& replay) const { return num_claims(cuts, replay.num_rows(kind)); }

void Linear::run(const Replay& replay, int claim, int) const {
    Rectangle part = rectangle(cuts, replay.num_rows(kind), claim);
    for (const Product& product : products) {
        const Matrix& w = product.weight->matrix();
        const bool has_add = add.has_value() && &product == products.data();
        if (part.tile < w.num_tiles()) {
            multiply(replay, w, {part.tile, std::min(part.tile_end, w.num_tiles()), part.row, part.row_end}, 0,
                     {product.out.row(replay, 0), std::size_t(product.out.width),
                      has_add ? add->row(replay, 0) : nullptr, has_add ? std::size_t(add->width) : 0});
        }
        part.tile = std::max(part.tile - w.num_tiles(), 0);
        part.tile_end -= w.num_tiles();
        if (part.tile_end <= 0) return;
    }
}

Head::Head(std::shared_ptr<const Weight> weight, std::optional<int> rest_row, int num_threads)
    : weight(std::move(weight)), rest_row(rest_row), cuts(cut_tiles(this->weight->matrix().num_tiles(), num_threads)) {}

std::size_t Head::max_tiles(const Bounds& bounds) const {
    return std::max(num_claims(cuts, bounds.max_rows), bounds.max_rows);
}

int Head::rounds(const Replay& replay) const {
    return 2 * ((replay.batch->num_rows() + replay.head_rows - 1) / replay.head_rows);
}

int Head::tiles(const Replay& replay) const {
    const bool is_sampling = replay.round % 2 == 1;
    return is_sampling ? head_rows(replay).count : num_claims(cuts, head_rows(replay).count);
}

void Head::run(const Replay& replay, int tile, int thread) const {
    const Matrix& w = weight->matrix();
    const HeadRows rows = head_rows(replay);
    if (replay.round % 2 == 1) {
        sample(replay, w.rows, rows.first + tile, replay.logits + std::size_t(tile) * w.rows,
               replay.sample_scratch + thread * replay.sample_scratch_bytes);
        return;
    }
    const Rectangle all = rectangle(cuts, rows.count, tile);
    const std::size_t stride = w.rows;
    for (Rectangle part = all; part.tile < all.tile_end; part.tile = part.tile_end) {
        part.tile_end = std::min(part.tile + kTilesAtOnce, all.tile_end);
        multiply(replay, w, part, rows.first, {replay.logits, stride, nullptr, 0});
        // The weights are in the cache by now.
        if (rest_row) multiply(replay, w, part, *rest_row + rows.first, {replay.logits, stride, replay.logits, stride});
    }
}

}  // namespace headrace
