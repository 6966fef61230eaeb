// What a program's operations point to: packed weights and the KV cache. Both know their size before they take memory.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "kernels.h"
#include "memory.h"
#include "threads.h"

namespace headrace {

// A matrix [rows, cols] packed in tiles for the kernels.
class Weight {
public:
    using Block = std::shared_ptr<std::byte>;  // memory that weights share, whoever's it is

    Weight(const Kernels& kernels, Format format, int rows, int cols)
        : kernels_(&kernels), shape_{.format = format, .rows = rows, .cols = cols, .tiles = nullptr} {}

    const Matrix& matrix() const { return shape_; }
    std::size_t nbytes() const { return shape_.bytes(); }
    bool is_packed() const { return shape_.tiles != nullptr; }
    bool has_place() const { return place_ != nullptr; }

    // Fills its memory (taken now, if it has no place yet) from the rows as they lie in model files.
    void pack(ThreadPool& pool, const std::byte* source) {
        if (place_ == nullptr) place(new_block(nbytes()), 0);
        parallel_for(pool, shape_.num_tiles(), [&](int tile, int) {
            kernels_->pack_tile(shape_, tile, source, place_ + tile * shape_.tile_bytes());
        });
        shape_.tiles = place_;
    }

    // One block of memory for all, in their order: the matrices of a small model are smaller than the huge pages that
    // spare a step its TLB misses. pack() fills it.
    static Block place_together(const std::vector<std::shared_ptr<Weight>>& weights) {
        const Block block = new_block(nbytes_together(weights));
        place_all(weights, block);
        return block;
    }

    // The same in a block that pack() has filled before, in some other process: all are packed then. It is only read.
    static void place_packed(const std::vector<std::shared_ptr<Weight>>& weights, const Block& block) {
        place_all(weights, block);
        for (const auto& weight : weights) weight->shape_.tiles = weight->place_;
    }

    static std::size_t nbytes_together(const std::vector<std::shared_ptr<Weight>>& weights) {
        std::size_t bytes = 0;
        for (const auto& weight : weights) bytes += align_up(weight->nbytes());
        return bytes;
    }

    void unpack_row(int row, float* out) const { kernels_->unpack_row(shape_, row, out); }

private:
    static Block new_block(std::size_t bytes) {
        const auto memory = std::make_shared<Memory>(bytes);
        return Block(memory, memory->data());
    }

    static void place_all(const std::vector<std::shared_ptr<Weight>>& weights, const Block& block) {
        const bool is_passing = nbytes_together(weights) > last_cache_bytes();
        std::size_t at = 0;
        for (const auto& weight : weights) {
            weight->place(block, std::exchange(at, at + align_up(weight->nbytes())));
            weight->shape_.is_passing = is_passing;
        }
    }

    void place(Block block, std::size_t offset) {
        block_ = std::move(block);
        place_ = block_.get() + offset;
    }

    const Kernels* kernels_;
    Matrix shape_;
    Block block_;
    std::byte* place_ = nullptr;
};

// The keys and values of a group of layers: [block][layer], so that memory is touched as blocks are used, and no layer
// for itself.
class KvCache {
public:
    KvCache(KvType type, int num_layers, int num_kv_heads, int head_dim)
        : num_layers_(num_layers), layer_{type, num_kv_heads, head_dim, nullptr, 0} {
        layer_.block_stride = num_layers * layer_block_nbytes();
    }

    int num_blocks() const { return num_blocks_; }
    int num_layers() const { return num_layers_; }
    int num_kv_heads() const { return layer_.num_kv_heads; }
    int head_dim() const { return layer_.head_dim; }
    std::size_t block_nbytes() const { return layer_.block_stride; }
    std::size_t layer_block_nbytes() const { return 2 * layer_.num_kv_heads * layer_.plane_bytes(); }
    std::size_t nbytes() const { return memory_.size(); }

    void allocate(int num_blocks) {
        memory_ = Memory(num_blocks * block_nbytes());
        num_blocks_ = num_blocks;
    }

    KvLayer layer(int index) const {
        KvLayer layer = layer_;
        layer.base = memory_.data() + index * layer_block_nbytes();
        return layer;
    }

    // Makes the operating system hand over the pages of some blocks. Safe beside running steps: adds zero, atomically,
    // to what is there.
    void touch(int first_block, int num_blocks) const {
        constexpr std::size_t kPage = 4096;
        std::byte* start = memory_.data() + first_block * block_nbytes();
        for (std::size_t at = 0; at < num_blocks * block_nbytes(); at += kPage) {
            __atomic_fetch_add(reinterpret_cast<std::uint8_t*>(start + at), 0, __ATOMIC_RELAXED);
        }
    }

private:
    int num_layers_;
    KvLayer layer_;
    int num_blocks_ = 0;
    Memory memory_;
};

}  // namespace headrace
