// Attention over paged keys and values, as planned: a tile of work is a claim for one KV head.
#include <array>

#include "phases.h"

namespace headrace {
namespace {

States at(const States& states, std::size_t state, int head_dim) {
    return {states.max + state, states.sum + state, states.acc + state * head_dim};
}

}  // namespace

std::size_t Attention::max_tiles(const Bounds& bounds) const {
    return AttentionBounds(bounds).items * cache->num_kv_heads();
}

void Attention::run(const Replay& replay, int tile, int thread) const {
    const AttentionPlan& plan = replay.attention;
    const AttentionClaim& claim = claim_of(replay, tile);
    for (int i = claim.first_item; i < claim.end_item; ++i) {
        Upcoming next{nullptr, tile % cache->num_kv_heads()};
        if (i + 1 < claim.end_item) {
            next.item = &plan.items[i + 1];
        } else if (tile + 1 < tiles(replay)) {  // unless the thread's share ends here
            next = {&plan.items[claim_of(replay, tile + 1).first_item], (tile + 1) % cache->num_kv_heads()};
        }
        run_item(replay, plan.items[i], next, tile % cache->num_kv_heads(), thread);
    }
}

const AttentionClaim& Attention::claim_of(const Replay& replay, int tile) const {
    return replay.attention.claims[tile / cache->num_kv_heads()];
}

void Attention::run_item(const Replay& replay, const AttentionItem& item, const Upcoming& next, int kv_head,
                         int thread) const {
    const KvLayer kv = cache->layer(layer);
    const int heads_per_kv = num_heads / kv.num_kv_heads;
    const auto blocks_of = [&](const AttentionItem& it, int segment) {
        return item_blocks(*replay.batch, it, group).subspan((segment - it.first_segment) * kSegmentBlocks);
    };
    const int* tokens = replay.attention.tokens.data() + item.first_token;
    const std::size_t head_offset = std::size_t(kv_head) * heads_per_kv * kv.head_dim;
    std::array<AttendQuery, kItemTokens> queries;
    for (int i = 0; i < item.num_segments; ++i) {
        const int segment = item.first_segment + i;
        for (int t = 0; t < item.num_tokens; ++t) {
            const int token = tokens[t];
            const std::size_t split_state =
                std::size_t(replay.attention.first_states[token] + segment) * num_heads + kv_head * heads_per_kv;
            const std::size_t own_state = std::size_t(i * item.num_tokens + t) * heads_per_kv;
            const States out_states = item.is_split ? at(replay.split_states, split_state, kv.head_dim)
                                                    : at(replay.thread_states[thread], own_state, kv.head_dim);
            queries[t] = {q.row(replay, token) + head_offset, replay.positions[token], out_states.max, out_states.sum,
                          out_states.acc};
        }
        Ints ahead;
        const bool is_last = i + 1 == item.num_segments;
        if (!is_last) {
            ahead = blocks_of(item, segment + 1);
        } else if (next.item != nullptr) {
            ahead = blocks_of(*next.item, next.item->first_segment);
        }
        const Ints here = blocks_of(item, segment);
        replay.kernels->attend({
            .kv = &kv,
            .blocks = here.data(),
            .num_blocks = int(here.size()),
            .next_blocks = ahead.data(),
            .num_next_blocks = int(ahead.size()),
            .next_kv_head = is_last ? next.kv_head : kv_head,
            .kv_head = kv_head,
            .heads_per_kv = heads_per_kv,
            .queries = queries.data(),
            .num_queries = item.num_tokens,
            .segment = segment,
            .scale = scale,
        });
    }
    if (!item.is_split) merge_tile(replay, item, kv_head, thread);
}

void Attention::merge_tile(const Replay& replay, const AttentionItem& item, int kv_head, int thread) const {
    const int heads_per_kv = num_heads / cache->num_kv_heads(), head_dim = cache->head_dim();
    const std::size_t tile_states = std::size_t(item.num_tokens) * heads_per_kv;  // of one segment
    for (int t = 0; t < item.num_tokens; ++t) {
        const int token = replay.attention.tokens[item.first_token + t];
        for (int head = 0; head < heads_per_kv; ++head) {
            const States state = at(replay.thread_states[thread], std::size_t(t) * heads_per_kv + head, head_dim);
            // Only the token's own segments: those that a tile of one token would have.
            replay.kernels->merge(state.max, state.sum, tile_states, state.acc, tile_states * head_dim,
                                  segments_before(replay.positions[token]), head_dim,
                                  out.row(replay, token) + (kv_head * heads_per_kv + head) * head_dim);
        }
    }
}

void Merge::run(const Replay& replay, int row) const {
    const int first_state = replay.attention.first_states[row];
    if (first_state < 0) return;
    const int head_dim = out.width / num_heads;
    for (int head = 0; head < num_heads; ++head) {
        const States state = at(replay.split_states, std::size_t(first_state) * num_heads + head, head_dim);
        replay.kernels->merge(state.max, state.sum, num_heads, state.acc, std::size_t(num_heads) * head_dim,
                              segments_before(replay.positions[row]), head_dim, out.row(replay, row) + head * head_dim);
    }
}

}  // namespace headrace
