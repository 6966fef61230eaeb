// How the attention of a step is cut for the threads: the same for all its layers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "batch.h"
#include "kernels.h"

namespace headrace {

inline constexpr int kQueryTile = 16;   // query tokens of one sequence that share a pass over K and V
inline constexpr int kItemTokens = 64;  // those of all sequences that keep a segment in the same blocks
inline constexpr int kSegmentBlocks = kSegmentTokens / kBlockTokens;

// Segments of a context that a token at `position` sees.
inline int segments_before(int position) { return position / kSegmentTokens + 1; }

// Query tokens over some segments of their context. Either a tile of a long slice over all that it sees, or tokens of
// short slices over one segment that they keep in the same blocks.
struct AttentionItem {
    int slice;        // whose blocks are read
    int first_token;  // index into AttentionPlan::tokens
    int num_tokens;
    int first_segment;
    int num_segments;
    int num_blocks;  // that hold what the tokens see, from the first segment on
    bool is_split;   // merging the segments' states is left to a row operation
};

// The blocks of a KV group in which the item's slice keeps what its tokens see.
inline Ints item_blocks(const Batch& batch, const AttentionItem& item, int group) {
    const int first = batch.block_offsets[group][item.slice] + item.first_segment * kSegmentBlocks;
    return batch.blocks[group].subspan(first, item.num_blocks);
}

// Items that one thread computes, for one KV head, one after another.
struct AttentionClaim {
    int first_item;
    int end_item;
};

// The most that any step may need.
struct AttentionBounds {
    explicit AttentionBounds(const Bounds& bounds);

    std::size_t split_states;   // in units of num_heads
    std::size_t thread_states;  // of an item that is not split, in units of heads_per_kv
    std::size_t items;
    std::size_t tokens;  // in all items
    std::size_t max_seqs;
    std::size_t max_tokens;

    std::size_t nbytes() const;
};

struct AttentionPlan {
    std::vector<AttentionItem> items;
    std::vector<AttentionClaim> claims;
    std::vector<int> tokens;  // of the items: indices of the step's tokens
    // [T]: where the states of a token's segments begin, in units of num_heads; -1: its item is not split
    std::vector<int> first_states;
    // Blocks of a KV group that the threads' own claims read, in their order, thread by thread: the first of them.
    struct BlocksRead {
        std::vector<std::int32_t> blocks;
        std::vector<int> begins;  // [num_threads + 1]
    };
    std::array<BlocksRead, kMaxKvGroups> blocks_read;

    // Takes all the memory that make() needs.
    void reserve(const AttentionBounds& bounds);
    void make(const Batch& batch, int num_threads, int num_kv_heads);
    // Fills blocks_read, after make(), with `most` blocks per thread at most; of none, begins say nothing. Without
    // those of long slices: their tiles read them again and again, so that they come from a cache anyway.
    void list_blocks_read(const Batch& batch, int group, int num_threads, std::size_t most);

private:
    void choose_split_slices(const Batch& batch);
    void add_split_items(const Batch& batch);
    void add_split_item(const Batch& batch, int begin, int end, int segment);
    void add_tiles(const Batch& batch, int query_tile);
    void order_tiles(int num_threads);
    void add_even_claims(int first_item, int most_claims);
    int num_tiles(const Batch& batch, int query_tile) const;

    std::size_t max_states_ = 0;
    std::vector<int> split_slices_;
    std::vector<int> group_ends_, next_group_ends_;
};

}  // namespace headrace
