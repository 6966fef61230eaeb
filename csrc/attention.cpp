// Attention over paged keys and values: which thread reads which part of which context.
//
// An item is a tile of query tokens; a claim is an item for one KV head. It goes over the segments of the context in
// order and merges their states. Where a step is too small to occupy the threads so, each segment is a claim of its own
// and the merge is left to a row operation: the same states in the same order, so the same bits.
#include <algorithm>

#include "phases.h"

namespace headrace {
namespace {

constexpr int kClaimsPerThread = 4;
constexpr int kMinQueryTile = 4;  // as many query tokens as a kernel multiplies with one load of K and V

int segments_before(int position) { return position / kSegmentTokens + 1; }

int num_tiles(const Batch& batch, int query_tile) {
    int count = 0;
    for (int s = 0; s < batch.num_slices(); ++s) {
        count += (batch.token_offsets[s + 1] - batch.token_offsets[s] + query_tile - 1) / query_tile;
    }
    return count;
}

States at(const States& states, std::size_t state, int head_dim) {
    return {states.max + state, states.sum + state, states.acc + state * head_dim};
}

void add_split_items(Replay& replay, AttentionItem item, int& first_state) {
    item.first_state = first_state;
    for (int i = 0; i < item.num_tokens; ++i) {
        replay.split_tokens.push_back({first_state, i, item.num_tokens, segments_before(item.first_position + i)});
    }
    first_state += item.num_segments * item.num_tokens;
    const int num_segments = item.num_segments;
    item.num_segments = 1;
    for (int segment = 0; segment < num_segments; ++segment) {
        item.first_segment = item.split_segment = segment;
        replay.items.push_back(item);
    }
}

}  // namespace

std::size_t max_split_states(int max_tokens, int max_len, int num_heads) {
    return std::size_t(std::min(max_tokens, kMaxSplitTokens)) * segments_before(max_len - 1) * num_heads;
}

std::size_t max_thread_states(int max_len, int heads_per_kv) {
    return std::size_t(kQueryTile) * segments_before(max_len - 1) * heads_per_kv;
}

std::size_t max_items(int max_tokens, int max_seqs, int max_len) {
    const std::size_t whole = std::size_t(max_tokens) / kMinQueryTile + max_seqs;
    return std::max(whole, std::size_t(kMaxSplitTokens) * segments_before(max_len - 1));
}

void plan_attention(Replay& replay, int num_kv_heads) {
    const Batch& batch = *replay.batch;
    const int enough = kClaimsPerThread * replay.num_threads;
    int query_tile = kQueryTile;
    while (query_tile > kMinQueryTile && num_tiles(batch, query_tile) * num_kv_heads < enough) query_tile /= 2;
    const bool is_split = batch.num_tokens() <= kMaxSplitTokens && num_tiles(batch, query_tile) * num_kv_heads < enough;

    replay.items.clear();
    replay.split_tokens.clear();
    int first_state = 0;
    for (int s = 0; s < batch.num_slices(); ++s) {
        const int begin = batch.token_offsets[s], end = batch.token_offsets[s + 1];
        for (int token = begin; token < end; token += query_tile) {
            const int count = std::min(query_tile, end - token), position = batch.starts[s] + token - begin;
            const AttentionItem item{s, token, count, position, 0, segments_before(position + count - 1), -1, 0};
            if (is_split) {
                add_split_items(replay, item, first_state);
            } else {
                replay.items.push_back(item);
            }
        }
    }
    // The last tiles of a long prompt see the most context: they go first, so that none is left over at the end.
    if (!is_split) std::reverse(replay.items.begin(), replay.items.end());
}

std::size_t Attention::max_tiles(const Bounds& bounds) const {
    return max_items(bounds.max_tokens, bounds.max_seqs, bounds.max_len) * cache->num_kv_heads();
}

void Attention::run(const Replay& replay, int tile, int thread) const {
    const KvLayer kv = cache->layer(layer);
    const AttentionItem& item = replay.items[tile / kv.num_kv_heads];
    const int kv_head = tile % kv.num_kv_heads, heads_per_kv = num_heads / kv.num_kv_heads;
    const int tile_states = item.num_tokens * heads_per_kv;  // of one segment and KV head
    const bool is_split = item.split_segment >= 0;
    const std::size_t split_state =
        std::size_t(item.first_state + item.split_segment * item.num_tokens) * num_heads + kv_head * tile_states;
    const States states = is_split ? at(replay.split_states, split_state, kv.head_dim) : replay.thread_states[thread];

    const std::size_t head_offset = std::size_t(kv_head) * heads_per_kv * kv.head_dim;
    for (int i = 0; i < item.num_segments; ++i) {
        const States out_states = at(states, std::size_t(i) * tile_states, kv.head_dim);
        replay.kernels->attend({
            .kv = &kv,
            .block_table = &replay.batch->blocks[group][replay.batch->block_offsets[group][item.slice]],
            .kv_head = kv_head,
            .heads_per_kv = heads_per_kv,
            .queries = q.row(replay, item.first_token) + head_offset,
            .query_stride = std::size_t(q.width),
            .num_queries = item.num_tokens,
            .first_position = item.first_position,
            .segment = item.first_segment + i,
            .scale = scale,
            .out_max = out_states.max,
            .out_sum = out_states.sum,
            .out_acc = out_states.acc,
        });
    }
    if (is_split) return;
    for (int i = 0; i < tile_states; ++i) {
        const int token = i / heads_per_kv, head = i % heads_per_kv;
        const States state = at(states, i, kv.head_dim);
        // Only the token's own segments: those that a tile of one token would have.
        replay.kernels->merge(state.max, state.sum, tile_states, state.acc, std::size_t(tile_states) * kv.head_dim,
                              segments_before(item.first_position + token), kv.head_dim,
                              out.row(replay, item.first_token + token) + head_offset + head * kv.head_dim);
    }
}

void Merge::run(const Replay& replay, int row) const {
    if (replay.split_tokens.empty()) return;
    const SplitToken& token = replay.split_tokens[row];
    const int heads_per_kv = num_heads / num_kv_heads, head_dim = out.width / num_heads;
    const std::size_t stride = std::size_t(token.tile_tokens) * num_heads;
    for (int head = 0; head < num_heads; ++head) {
        const int kv_head = head / heads_per_kv;
        const std::size_t in_segment =
            std::size_t(kv_head * token.tile_tokens + token.index) * heads_per_kv + head % heads_per_kv;
        const States state = at(replay.split_states, std::size_t(token.first_state) * num_heads + in_segment, head_dim);
        replay.kernels->merge(state.max, state.sum, stride, state.acc, stride * head_dim, token.num_segments, head_dim,
                              out.row(replay, row) + head * head_dim);
    }
}

}  // namespace headrace
