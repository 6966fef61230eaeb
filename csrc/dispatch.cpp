// Which instruction sets the build has and the machine can run. Compiled without instruction-set flags.
#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace headrace {

extern const Kernels kernels_scalar;
#if defined(HEADRACE_HAS_AVX2)
extern const Kernels kernels_avx2;
#endif
#if defined(HEADRACE_HAS_AVX512)
extern const Kernels kernels_avx512;
#endif
#if defined(HEADRACE_HAS_NEON)
extern const Kernels kernels_neon;
#endif

namespace {

#if defined(__x86_64__)

struct Cpuid {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Cpuid cpuid(unsigned leaf, unsigned subleaf) {
    Cpuid id;
    if (!__get_cpuid_count(leaf, subleaf, &id.eax, &id.ebx, &id.ecx, &id.edx)) return {};
    return id;
}

constexpr bool has(unsigned word, int bit) { return (word >> bit) & 1u; }

// The register state that the operating system saves on a context switch. A processor may have AVX-512 while the
// kernel or the hypervisor has it switched off: cpuid alone is not enough.
unsigned saved_state() {
    if (!has(cpuid(1, 0).ecx, 27)) return 0;  // OSXSAVE: xgetbv exists
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

constexpr unsigned kSavesAvx = 0x06;     // XMM, YMM
constexpr unsigned kSavesAvx512 = 0xe6;  // and opmask, upper halves, upper registers

bool runs_avx2() {
    const Cpuid base = cpuid(1, 0);
    const bool has_avx = has(base.ecx, 28), has_fma = has(base.ecx, 12), has_f16c = has(base.ecx, 29);
    const bool has_avx2 = has(cpuid(7, 0).ebx, 5);
    return (saved_state() & kSavesAvx) == kSavesAvx && has_avx && has_fma && has_f16c && has_avx2;
}

bool runs_avx512() {
    const Cpuid features = cpuid(7, 0);
    const bool has_f = has(features.ebx, 16), has_dq = has(features.ebx, 17);
    const bool has_bw = has(features.ebx, 30), has_vl = has(features.ebx, 31);
    const bool has_vnni = has(features.ecx, 11), has_bf16 = has(cpuid(7, 1).eax, 5);
    return runs_avx2() && (saved_state() & kSavesAvx512) == kSavesAvx512 && has_f && has_dq && has_bw && has_vl &&
           has_vnni && has_bf16;
}

#elif defined(__aarch64__)

// NEON itself is part of AArch64, the dot products are not.
bool runs_neon() { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }

#endif

}  // namespace

const Kernels* kernels_for(Isa isa) {
    switch (isa) {
        case Isa::scalar:
            return &kernels_scalar;
        case Isa::avx2:
#if defined(HEADRACE_HAS_AVX2)
            return runs_avx2() ? &kernels_avx2 : nullptr;
#else
            return nullptr;
#endif
        case Isa::avx512:
#if defined(HEADRACE_HAS_AVX512)
            return runs_avx512() ? &kernels_avx512 : nullptr;
#else
            return nullptr;
#endif
        case Isa::neon:
#if defined(HEADRACE_HAS_NEON)
            return runs_neon() ? &kernels_neon : nullptr;
#else
            return nullptr;
#endif
    }
    return nullptr;
}

}  // namespace headrace
