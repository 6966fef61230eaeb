// Row operations: what a phase does to one row.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "phases.h"

namespace headrace {

void Embed::run(const Replay& replay, int row) const {
    table->unpack_row(replay.batch->tokens[row], out.row(replay, row));
}

void RmsNorm::run(const Replay& replay, int row) const {
    replay.kernels->rms_norm(norm.x.row(replay, row), norm.weight->data(), out.width, norm.eps, out.row(replay, row));
}

void SiluMul::run(const Replay& replay, int row) const {
    replay.kernels->silu_mul(gate.gate.row(replay, row), gate.up.row(replay, row), out.width, out.row(replay, row));
}

void Quantize::run(const Replay& replay, int row) const {
    const Kernels& kernels = *replay.kernels;
    const std::size_t row_bytes = act_row_bytes(act, width);
    std::byte* acts = replay.acts[int(act)] + row * row_bytes;
    std::byte* rest = rest_row ? acts + *rest_row * row_bytes : nullptr;
    if (const auto* norm = std::get_if<Norm>(&x)) {
        kernels.quantize_norm(act, norm->x.row(replay, row), norm->weight->data(), width, norm->eps, acts, rest);
    } else if (const auto* gate = std::get_if<Gate>(&x)) {
        kernels.quantize_gated(act, gate->gate.row(replay, row), gate->up.row(replay, row), width, acts, rest);
    } else {
        kernels.quantize_row(act, std::get<Buffer>(x).row(replay, row), width, acts, rest);
    }
}

void FillRotary::run(const Replay& replay, int row) const {
    replay.kernels->rotary_angles(turns.data(), table.pairs, replay.positions[row], magnitude,
                                  table.cosines(replay, row), table.sines(replay, row));
}

void Rotate::run(const Replay& replay, int row) const {
    replay.kernels->rotate(x.row(replay, row), x.width / head_dim, head_dim, table.pairs, table.cosines(replay, row),
                           table.sines(replay, row), out.row(replay, row));
}

void StoreKv::run(const Replay& replay, int row) const {
    const int slice = replay.token_slices[row], position = replay.positions[row];
    const std::int32_t* blocks = &replay.batch->blocks[group][replay.batch->block_offsets[group][slice]];
    replay.kernels->store_kv(cache->layer(layer), blocks[position / kBlockTokens], position % kBlockTokens,
                             keys.row(replay, row), values.row(replay, row));
}

void Add::run(const Replay& replay, int row) const {
    replay.kernels->add(x.row(replay, row), y.row(replay, row), out.width, out.row(replay, row));
}

void SelectRows::run(const Replay& replay, int row) const {
    std::memcpy(out.row(replay, row), x.row(replay, replay.batch->row_tokens[row]), out.width * sizeof(float));
}

// Enough tiles to balance, few enough that claiming them costs nothing beside a row's work.
int Rows::rows_per_tile(const Replay& replay) const {
    return std::clamp(replay.num_rows(kind) / (4 * replay.num_threads), 1, 8);
}

int Rows::tiles(const Replay& replay) const {
    const int per_tile = rows_per_tile(replay);
    return (replay.num_rows(kind) + per_tile - 1) / per_tile;
}

void Rows::run(const Replay& replay, int tile, int) const {
    const int per_tile = rows_per_tile(replay), first = tile * per_tile;
    const int end = std::min(first + per_tile, replay.num_rows(kind));
    for (int row = first; row < end; ++row) {
        for (const RowOp& op : ops) std::visit([&](const auto& it) { it.run(replay, row); }, op);
    }
}

}  // namespace headrace
