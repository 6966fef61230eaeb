#include "attention_plan.h"

#include <algorithm>

#include "threads.h"

namespace headrace {
namespace {

constexpr int kClaimsPerThread = 8;
constexpr int kTilesPerThread = 4;
constexpr int kMinQueryTile = 4;               // below, K and V are read too often
constexpr std::size_t kMaxSplitStates = 2048;  // in units of num_heads: 64 tokens that see 8,192 positions

int slice_tokens(const Batch& batch, int slice) { return batch.token_offsets[slice + 1] - batch.token_offsets[slice]; }

int last_position(const Batch& batch, int slice) { return batch.starts[slice] + slice_tokens(batch, slice) - 1; }

// Whether two slices keep a segment, which all their tokens see to its end, in the same blocks.
bool share_segment(const Batch& batch, int a, int b, int segment) {
    if (std::min(batch.starts[a], batch.starts[b]) < (segment + 1) * kSegmentTokens) return false;
    for (int group = 0; group < batch.num_groups; ++group) {
        const std::int32_t* blocks = batch.blocks[group].data() + segment * kSegmentBlocks;
        const std::int32_t* of_a = blocks + batch.block_offsets[group][a];
        const std::int32_t* of_b = blocks + batch.block_offsets[group][b];
        if (!std::equal(of_a, of_a + kSegmentBlocks, of_b)) return false;
    }
    return true;
}

// In tokens of context: reading one costs as much as the products with it of about 4 query tokens.
double work_of(const AttentionItem& item) { return double(item.num_blocks) * kBlockTokens * (4 + item.num_tokens); }

}  // namespace

AttentionBounds::AttentionBounds(const Bounds& bounds) : max_seqs(bounds.max_seqs), max_tokens(bounds.max_tokens) {
    const std::size_t num_segments = segments_before(bounds.max_len - 1);
    split_states = std::max(num_segments, std::min(max_tokens * num_segments, kMaxSplitStates));
    thread_states = kQueryTile * num_segments;
    items = max_tokens / kMinQueryTile + max_seqs + split_states;
    tokens = max_tokens + split_states;
}

std::size_t AttentionBounds::nbytes() const {
    return items * (sizeof(AttentionItem) + sizeof(AttentionClaim)) +
           (tokens + max_tokens + 3 * max_seqs) * sizeof(int);
}

void AttentionPlan::reserve(const AttentionBounds& bounds) {
    max_states_ = bounds.split_states;
    items.reserve(bounds.items);
    claims.reserve(bounds.items);
    tokens.reserve(bounds.tokens);
    first_states.reserve(bounds.max_tokens);
    split_slices_.reserve(bounds.max_seqs);
    group_ends_.reserve(bounds.max_seqs);
    next_group_ends_.reserve(bounds.max_seqs);
}

void AttentionPlan::make(const Batch& batch, int num_threads, int num_kv_heads) {
    items.clear();
    claims.clear();
    tokens.clear();
    choose_split_slices(batch);

    int query_tile = kQueryTile;
    const auto has_few_tiles = [&] {
        return num_tiles(batch, query_tile) * num_kv_heads < kTilesPerThread * num_threads;
    };
    while (query_tile > kMinQueryTile && has_few_tiles()) query_tile /= 2;
    add_tiles(batch, query_tile);
    order_tiles(num_threads);
    for (int i = 0; i < int(items.size()); ++i) claims.push_back({i, i + 1});

    const int first_split = int(items.size());
    add_split_items(batch);
    add_even_claims(first_split, (kClaimsPerThread * num_threads + num_kv_heads - 1) / num_kv_heads);
}

void AttentionPlan::list_blocks_read(const Batch& batch, int group, int num_threads, std::size_t most) {
    auto& [blocks, begins] = blocks_read[group];
    blocks.clear();
    begins.assign(1, 0);
    if (most == 0) return;
    for (int thread = 0; thread < num_threads; ++thread) {
        const int num_claims = int(claims.size()), claim_end = share_begin(num_claims, thread + 1, num_threads);
        for (int claim = share_begin(num_claims, thread, num_threads); claim < claim_end; ++claim) {
            for (int i = claims[claim].first_item; i < claims[claim].end_item; ++i) {
                if (!items[i].is_split) continue;
                const auto read = item_blocks(batch, items[i], group);
                const std::size_t room = begins.back() + most - blocks.size();
                blocks.insert(blocks.end(), read.begin(), read.begin() + std::min(read.size(), room));
            }
        }
        begins.push_back(int(blocks.size()));
    }
}

// Short slices, as long as there are states for the segments that their tokens see.
void AttentionPlan::choose_split_slices(const Batch& batch) {
    std::size_t num_states = 0;
    first_states.assign(batch.num_tokens(), -1);
    split_slices_.clear();
    for (int slice = 0; slice < batch.num_slices(); ++slice) {
        const int count = slice_tokens(batch, slice);
        const std::size_t num_segments = segments_before(last_position(batch, slice));
        if (count > kQueryTile || num_states + count * num_segments > max_states_) continue;
        split_slices_.push_back(slice);
        for (int i = 0; i < count; ++i, num_states += num_segments) {
            first_states[batch.token_offsets[slice] + i] = int(num_states);
        }
    }
}

// Segment by segment: `split_slices_` lies in groups that have had the same blocks so far, and each falls apart into
// those that still have. Slices that share a segment without sharing those before it are not found.
void AttentionPlan::add_split_items(const Batch& batch) {
    group_ends_.assign(1, int(split_slices_.size()));
    for (int segment = 0; !split_slices_.empty(); ++segment) {
        int kept = 0, first = 0;
        next_group_ends_.clear();
        for (const int group_end : group_ends_) {
            int begin = kept;
            for (; first < group_end; ++first) {
                const int slice = split_slices_[first];
                if (segment < segments_before(last_position(batch, slice))) split_slices_[kept++] = slice;
            }
            while (begin < kept) {
                const auto members = split_slices_.begin();
                const auto end = std::partition(members + begin + 1, members + kept, [&](int other) {
                    return share_segment(batch, members[begin], other, segment);
                });
                add_split_item(batch, begin, int(end - members), segment);
                begin = int(end - members);
                next_group_ends_.push_back(begin);
            }
        }
        split_slices_.resize(kept);
        std::swap(group_ends_, next_group_ends_);
    }
}

// The tokens of split_slices_[begin..end) over a segment: one item, or several where they are many.
void AttentionPlan::add_split_item(const Batch& batch, int begin, int end, int segment) {
    const int first_block = segment * kSegmentBlocks;
    AttentionItem item{split_slices_[begin], int(tokens.size()), 0, segment, 1, 0, true};
    for (int i = begin; i < end; ++i) {
        const int slice = split_slices_[i], count = slice_tokens(batch, slice);
        if (item.num_tokens + count > kItemTokens) {
            items.push_back(item);
            item.first_token = int(tokens.size());
            item.num_tokens = 0;
        }
        item.num_blocks = std::min(last_position(batch, slice) / kBlockTokens + 1 - first_block, kSegmentBlocks);
        item.num_tokens += count;
        for (int token = 0; token < count; ++token) tokens.push_back(batch.token_offsets[slice] + token);
    }
    items.push_back(item);
}

int AttentionPlan::num_tiles(const Batch& batch, int query_tile) const {
    int count = 0;
    for (int slice = 0; slice < batch.num_slices(); ++slice) {
        if (first_states[batch.token_offsets[slice]] >= 0) continue;
        count += (slice_tokens(batch, slice) + query_tile - 1) / query_tile;
    }
    return count;
}

void AttentionPlan::add_tiles(const Batch& batch, int query_tile) {
    for (int slice = 0; slice < batch.num_slices(); ++slice) {
        const int begin = batch.token_offsets[slice], end = batch.token_offsets[slice + 1];
        if (first_states[begin] >= 0) continue;
        for (int token = begin; token < end; token += query_tile) {
            const int count = std::min(query_tile, end - token);
            const int position = batch.starts[slice] + token - begin + count - 1;
            items.push_back(
                {slice, int(tokens.size()), count, 0, segments_before(position), position / kBlockTokens + 1, false});
            for (int i = 0; i < count; ++i) tokens.push_back(token + i);
        }
    }
}

// A thread's share is of the rows that are its own in the phases before and after. Within it the last tiles of a
// prompt, which see the most context, go first, so that none is left over at the end.
void AttentionPlan::order_tiles(int num_threads) {
    const auto share = [&](int thread) { return items.begin() + share_begin(int(items.size()), thread, num_threads); };
    for (int thread = 0; thread < num_threads; ++thread) std::reverse(share(thread), share(thread + 1));
}

// Claims of as even work as items allow: a small one left over would make the share that it falls into the smaller,
// and what is taken from the other one nobody has fetched ahead.
void AttentionPlan::add_even_claims(int first_item, int most_claims) {
    double total = 0.0, before = 0.0;
    for (int i = first_item; i < int(items.size()); ++i) total += work_of(items[i]);
    int last = -1;
    for (int i = first_item; i < int(items.size()); ++i) {
        const double work = work_of(items[i]);
        const int claim = int((before + work / 2) / total * most_claims);
        if (claim != last) claims.push_back({i, i});
        claims.back().end_item = i + 1;
        last = claim;
        before += work;
    }
}

}  // namespace headrace
