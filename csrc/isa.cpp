// The kernels for one instruction set: compiled once per set, with HEADRACE_ISA naming it,
// HEADRACE_ISA_HEADER its primitives, and flags to match.
//
// All is in an anonymous namespace: an inline function compiled with wide flags must never be the copy that the linker
// keeps for everyone. Only the table leaves (check_symbols.cmake looks). Standard headers come before it, and
// of them only what is inlined away is used.
#include <algorithm>
#include <array>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernels.h"
#include "philox.h"
#include "sample.h"

#define HEADRACE_JOIN2(a, b) a##b
#define HEADRACE_JOIN(a, b) HEADRACE_JOIN2(a, b)

namespace headrace {
namespace {

#include HEADRACE_ISA_HEADER
#include "simd/math.inc"
#include "kernels/rows.inc"
#include "kernels/quantize.inc"
#include "kernels/gemm_formats.inc"
#include "kernels/gemm.inc"
#include "kernels/kv.inc"
#include "kernels/attention_chunk.inc"
#include "kernels/attention.inc"
#include "kernels/contenders.inc"
#include "kernels/sample.inc"

}  // namespace

extern const Kernels HEADRACE_JOIN(kernels_, HEADRACE_ISA);
const Kernels HEADRACE_JOIN(kernels_, HEADRACE_ISA) = {
    .name = kIsaName,
    .pack_tile = pack_tile,
    .unpack_row = unpack_row,
    .quantize_row = quantize_row,
    .quantize_norm = quantize_norm,
    .quantize_gated = quantize_gated,
    .gemm = gemm,
    .rms_norm = rms_norm,
    .silu_mul = silu_mul,
    .add = add,
    .rotary_angles = rotary_angles,
    .rotate = rotate,
    .store_kv = store_kv,
    .attend = attend,
    .merge = merge,
    .find_contenders = find_contenders,
    .sample = sample,
};

}  // namespace headrace
