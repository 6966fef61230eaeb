// What each weight and activation format occupies. Compiled without instruction-set flags.
#include "kernels.h"

namespace headrace {
namespace {

constexpr std::size_t kTileGroupValues = std::size_t(kLanes) * kGroup;
constexpr std::size_t kScaleBytes = 2 * kLanes;  // one f16 for each output of a tile

constexpr FormatTraits kTraits[] = {
    {"f32", Act::f32, 1, 4, kTileGroupValues * 4},
    {"f16", Act::f32, 1, 2, kTileGroupValues * 2},
    {"bf16", Act::bf16, 1, 2, kTileGroupValues * 2},
    {"q8_0", Act::q8, kGroup, 34, kTileGroupValues + kScaleBytes},
    {"q4_0", Act::q8, kGroup, 18, kTileGroupValues / 2 + kScaleBytes},
    {"q4_1", Act::q8, kGroup, 20, kTileGroupValues / 2 + 2 * kScaleBytes},
};

}  // namespace

const FormatTraits& traits(Format format) { return kTraits[static_cast<int>(format)]; }

std::size_t act_row_bytes(Act act, int cols) {
    const std::size_t groups = (cols + kGroup - 1) / kGroup;
    switch (act) {
        case Act::f32:
            return align_up(groups * kGroup * sizeof(float));
        case Act::bf16:
            return align_up(groups * kGroup * sizeof(std::uint16_t));
        case Act::q8:
            return align_up(groups * kQ8GroupBytes);
    }
    return 0;
}

}  // namespace headrace
