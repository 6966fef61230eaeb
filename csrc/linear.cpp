// Matrix products: a claim is some tiles of one weight times some rows.
#include <algorithm>
#include <cmath>
#include <utility>

#include "phases.h"
#include "threads.h"

namespace headrace {
namespace {

// Weight tiles that a kernel takes at once for many rows.
constexpr int kTilesAtOnce = 2;
// Rows of a claim: 128 rows of 8-bit activations stay in L2 while the claim's weights pass.
constexpr int kClaimRows = 128;
// What a waiting thread may fetch of its next weights: more than it has time for between two phases of a decode step.
constexpr std::size_t kAheadBytes = 64 << 10;

int row_claims(int num_rows) { return (num_rows + kClaimRows - 1) / kClaimRows; }

std::span<const std::byte> tiles_from(const Matrix& w, int tile) {
    const std::span<const std::byte> all(w.tiles, w.bytes());
    const std::span<const std::byte> rest = all.subspan(tile * w.tile_bytes());
    return rest.first(std::min(rest.size(), kAheadBytes));
}

struct Rectangle {  // of a product: weight tiles [tile, tile_end) by rows [row, row_end)
    int tile, tile_end;
    int row, row_end;
};

// The product of w and all rows of activations, from row `first_act` on.
Gemm product_of(const Replay& replay, const Matrix& w, int first_act) {
    const Act act = traits(w.format).act;
    const std::size_t act_stride = act_row_bytes(act, w.cols);
    return {.w = &w, .acts = replay.acts[int(act)] + first_act * act_stride, .act_stride = act_stride};
}

void multiply(const Replay& replay, const Rectangle& part, Gemm product) {
    product.tile_begin = part.tile;
    product.tile_end = part.tile_end;
    product.acts += part.row * product.act_stride;
    product.num_rows = part.row_end - part.row;
    product.out += part.row * product.out_stride;
    if (product.add != nullptr) product.add += part.row * product.add_stride;
    replay.kernels->gemm(product);
}

// Claim `claim` of `num_rows` rows by the tiles of `cuts`: tiles fastest. So a thread's share of many rows is rows, of
// which its own caches hold what it computed in the phases before, and of few rows it is tiles.
Rectangle rectangle(const TileCuts& cuts, int num_rows, int claim) {
    const int range = claim % cuts.num_ranges(), row = claim / cuts.num_ranges() * kClaimRows;
    return {cuts.begin(range), cuts.end(range), row, std::min(row + kClaimRows, num_rows)};
}

int num_claims(const TileCuts& cuts, int num_rows) { return cuts.num_ranges() * row_claims(num_rows); }

// The head's present rows.
struct HeadRows {
    int first;
    int count;
};

HeadRows head_rows(const Replay& replay) {
    const int first = replay.round / 2 * replay.head_rows;
    return {first, std::min(replay.head_rows, replay.batch->num_rows() - first)};
}

// Adds the second term of the inputs, in the row `rest_row` of activations, to the logits that may win.
void refine(const Replay& replay, const Matrix& w, int rest_row, float* logits, std::byte* scratch) {
    const auto tokens = reinterpret_cast<std::int32_t*>(scratch);
    const int count = replay.kernels->find_contenders(logits, w.rows, kContenderMargin, kMaxContenders, tokens);
    for (int i = 0; i < count;) {
        const int tile = tokens[i] / kLanes, first_token = tile * kLanes;
        Matrix one = w;
        one.rows = std::min(kLanes, w.rows - first_token);
        one.tiles += tile * w.tile_bytes();
        float rest[kLanes];
        Gemm gemm = product_of(replay, one, rest_row);
        gemm.out = rest;
        multiply(replay, {0, 1, 0, 1}, gemm);
        for (; i < count && tokens[i] < first_token + kLanes; ++i) logits[tokens[i]] += rest[tokens[i] - first_token];
    }
}

void sample(const Replay& replay, int vocab, int row, float* logits, std::byte* scratch) {
    SampleRow it = sample_row(replay.batch->sampling, replay.batch->mask, *replay.results, vocab, row);
    it.logits = logits;
    it.scratch = scratch;
    replay.kernels->sample(it);
}

}  // namespace

// A range is a share of what is left of the thread's tiles (guided self-scheduling, Polychronopoulos and Kuck 1987):
// few claims, and little to wait for when another thread takes the last.
TileCuts::TileCuts(int num_tiles, int num_threads) : num_threads_(num_threads) {
    const auto first_of = [&](int thread) {
        if (thread == num_threads) return num_tiles;
        return share_begin(num_tiles, thread, num_threads) / kTilesAtOnce * kTilesAtOnce;
    };
    int longest = 0;
    for (int thread = 0; thread < num_threads; ++thread) {
        longest = std::max(longest, first_of(thread + 1) - first_of(thread));
    }
    cuts_.push_back(0);
    for (int thread = 0; thread < num_threads; ++thread) {
        for (int left = longest; left > 0;) {
            const int size = std::max(left / 4 / kTilesAtOnce * kTilesAtOnce, kTilesAtOnce);
            cuts_.push_back(std::min(cuts_.back() + size, first_of(thread + 1)));
            left -= size;
        }
    }
}

Linear::Linear(RowKind kind, std::vector<Product> products, std::optional<Buffer> add, int num_threads)
    : kind(kind), products(std::move(products)), add(std::move(add)), cuts(num_tiles(), num_threads) {}

int Linear::num_tiles() const {
    int count = 0;
    for (const Product& product : products) count += product.weight->matrix().num_tiles();
    return count;
}

double Linear::work() const {
    double work = 0.0;
    for (const Product& product : products) {
        work += double(product.weight->matrix().num_tiles()) * product.weight->matrix().num_groups();
    }
    return work;
}

std::span<const std::byte> Linear::first_weights(int thread) const {
    int tile = cuts.first_of(thread);
    for (const Product& product : products) {
        const Matrix& w = product.weight->matrix();
        if (tile < w.num_tiles()) return tiles_from(w, tile);
        tile -= w.num_tiles();
    }
    return {};
}

std::size_t Linear::max_tiles(const Bounds& bounds) const { return num_claims(cuts, max_rows(bounds, kind)); }

int Linear::tiles(const Replay& replay) const { return num_claims(cuts, replay.num_rows(kind)); }

// A claim's part, in proportion to its tiles, of what is fetched for the thread whose own it is.
BlockLines Linear::later_of(const Replay& replay, int claim) const {
    if (!later || replay.attention.blocks_read[later->group].blocks.empty()) return {};
    const auto& [blocks, begins] = replay.attention.blocks_read[later->group];
    const int num_claims = tiles(replay), num_threads = replay.num_threads;
    int thread = 0;
    while (share_begin(num_claims, thread + 1, num_threads) <= claim) ++thread;

    const auto tiles_before = [&](int it) {
        return double(it / cuts.num_ranges()) * num_tiles() + cuts.begin(it % cuts.num_ranges());
    };
    const double first = tiles_before(share_begin(num_claims, thread, num_threads));
    const double count = tiles_before(share_begin(num_claims, thread + 1, num_threads)) - first;
    if (count == 0.0) return {};
    const int block_lines = int(later->cache->layer_block_nbytes() / kLine);
    const int begin = begins[thread] * block_lines, num_lines = begins[thread + 1] * block_lines - begin;
    const auto line = [&](int it) {
        const double part = (tiles_before(it) - first) / count;
        return begin + int(num_lines * std::lerp(later->begin, later->end, part));
    };
    const KvLayer kv = later->cache->layer(later->layer);
    return {kv.base, kv.block_stride, block_lines, blocks.data(), line(claim), line(claim + 1)};
}

void Linear::run(const Replay& replay, int claim, int) const {
    Rectangle part = rectangle(cuts, replay.num_rows(kind), claim);
    BlockLines later = later_of(replay, claim);
    for (const Product& product : products) {
        const Matrix& w = product.weight->matrix();
        if (part.tile < w.num_tiles()) {
            Gemm gemm = product_of(replay, w, 0);
            gemm.out = product.out.row(replay, 0);
            gemm.out_stride = product.out.width;
            gemm.later = std::exchange(later, {});
            if (add.has_value() && &product == products.data()) {
                gemm.add = add->row(replay, 0);
                gemm.add_stride = add->width;
            }
            multiply(replay, {part.tile, std::min(part.tile_end, w.num_tiles()), part.row, part.row_end}, gemm);
        }
        part.tile = std::max(part.tile - w.num_tiles(), 0);
        part.tile_end -= w.num_tiles();
        if (part.tile_end <= 0) return;
    }
}

Head::Head(std::shared_ptr<const Weight> weight, std::optional<int> rest_row, int num_threads)
    : weight(std::move(weight)), rest_row(rest_row), cuts(this->weight->matrix().num_tiles(), num_threads) {}

std::span<const std::byte> Head::first_weights(int thread) const {
    return tiles_from(weight->matrix(), std::min(cuts.first_of(thread), weight->matrix().num_tiles()));
}

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
        const int row = rows.first + tile;
        float* logits = replay.logits + std::size_t(tile) * w.rows;
        std::byte* scratch = replay.sample_scratch + thread * replay.sample_scratch_bytes;
        if (rest_row) refine(replay, w, *rest_row + row, logits, scratch);
        sample(replay, w.rows, row, logits, scratch);
        return;
    }
    Gemm gemm = product_of(replay, w, rows.first);
    gemm.out = replay.logits;
    gemm.out_stride = w.rows;
    multiply(replay, rectangle(cuts, rows.count, tile), gemm);
}

}  // namespace headrace
