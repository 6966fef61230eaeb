// The primitives of simd/scalar.h on AArch64 NEON with the dot product instructions: four registers per vector.
inline constexpr const char* kIsaName = "neon";
inline constexpr int kWeightOffset8 = 0;  // sdot multiplies signed by signed
// 2 rows x 1 tile of four registers each: 8 f32 and 8 integer accumulators, 8 of weights, 2 broadcast inputs of 32.
inline constexpr int kGemmRows = 2;
inline constexpr int kGemmFloatRows = 4;  // 16 accumulators, 4 weights, 1 broadcast input
inline constexpr int kGemmTiles = 1;
inline constexpr int kGemmFewRows = 4;  // rows that take one tile at a time
// 4 rows x 1 vector: 16 accumulators, 8 of one K or V in f32, 1 broadcast
inline constexpr int kAttendRows = 4;
inline constexpr int kAttendVectors = 1;
inline constexpr int kSoftenRows = 2;

struct f32x16 {
    float32x4_t v[4];
};
struct i32x16 {
    int32x4_t v[4];
};
struct mask16 {  // all ones where true
    uint32x4_t v[4];
};

template <class Result, class F>
[[gnu::always_inline]] inline Result each(F&& f) {  // of the four registers
    return {{f(0), f(1), f(2), f(3)}};
}

inline uint32x4_t as_u32(int32x4_t x) { return vreinterpretq_u32_s32(x); }
inline int32x4_t as_i32(uint32x4_t x) { return vreinterpretq_s32_u32(x); }
inline uint8x16_t load_128(const std::byte* p) { return vld1q_u8(reinterpret_cast<const std::uint8_t*>(p)); }
inline void store_128(std::byte* p, uint8x16_t x) { vst1q_u8(reinterpret_cast<std::uint8_t*>(p), x); }

// f32 ---------------------------------------------------------------------------------------------------------------

inline f32x16 splat(float x) {
    return each<f32x16>([&](int) { return vdupq_n_f32(x); });
}
inline f32x16 load(const float* p) {
    return each<f32x16>([&](int i) { return vld1q_f32(p + 4 * i); });
}
inline f32x16 load_first(const float* p, int n) {  // there are no masked loads
    if (n == 16) return load(p);
    float padded[16] = {};
    std::memcpy(padded, p, n * sizeof(float));
    return load(padded);
}
inline void store(float* p, f32x16 x) {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.v[i]);
}
inline void store_first(float* p, f32x16 x, int n) {
    if (n == 16) return store(p, x);
    float all[16];
    store(all, x);
    std::memcpy(p, all, n * sizeof(float));
}

inline f32x16 operator+(f32x16 a, f32x16 b) {
    return each<f32x16>([&](int i) { return vaddq_f32(a.v[i], b.v[i]); });
}
inline f32x16 operator-(f32x16 a, f32x16 b) {
    return each<f32x16>([&](int i) { return vsubq_f32(a.v[i], b.v[i]); });
}
inline f32x16 operator*(f32x16 a, f32x16 b) {
    return each<f32x16>([&](int i) { return vmulq_f32(a.v[i], b.v[i]); });
}
inline f32x16 operator/(f32x16 a, f32x16 b) {
    return each<f32x16>([&](int i) { return vdivq_f32(a.v[i], b.v[i]); });
}
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    return each<f32x16>([&](int i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
}
// By comparison: fmin and fmax would give NaN, not the second operand.
inline float32x4_t min_of_four(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline float32x4_t max_of_four(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline f32x16 min(f32x16 a, f32x16 b) {
    return each<f32x16>([&](int i) { return min_of_four(a.v[i], b.v[i]); });
}
inline f32x16 max(f32x16 a, f32x16 b) {
    return each<f32x16>([&](int i) { return max_of_four(a.v[i], b.v[i]); });
}
inline f32x16 round_even(f32x16 x) {
    return each<f32x16>([&](int i) { return vrndnq_f32(x.v[i]); });
}

// i32 ---------------------------------------------------------------------------------------------------------------

inline i32x16 splat(std::int32_t x) {
    return each<i32x16>([&](int) { return vdupq_n_s32(x); });
}
inline i32x16 load(const std::int32_t* p) {
    return each<i32x16>([&](int i) { return vld1q_s32(p + 4 * i); });
}
inline i32x16 load_bytes(const std::byte* p) {
    return each<i32x16>([&](int i) { return vreinterpretq_s32_u8(load_128(p + 16 * i)); });
}
inline i32x16 splat_bytes(const std::byte* p) {
    std::int32_t word;
    std::memcpy(&word, p, sizeof word);
    return splat(word);
}
inline void store(std::int32_t* p, i32x16 x) {
    for (int i = 0; i < 4; ++i) vst1q_s32(p + 4 * i, x.v[i]);
}

inline i32x16 operator+(i32x16 a, i32x16 b) {
    return each<i32x16>([&](int i) { return vaddq_s32(a.v[i], b.v[i]); });
}
inline i32x16 operator-(i32x16 a, i32x16 b) {
    return each<i32x16>([&](int i) { return vsubq_s32(a.v[i], b.v[i]); });
}
inline i32x16 operator&(i32x16 a, i32x16 b) {
    return each<i32x16>([&](int i) { return vandq_s32(a.v[i], b.v[i]); });
}
inline i32x16 operator|(i32x16 a, i32x16 b) {
    return each<i32x16>([&](int i) { return vorrq_s32(a.v[i], b.v[i]); });
}
inline i32x16 operator^(i32x16 a, i32x16 b) {
    return each<i32x16>([&](int i) { return veorq_s32(a.v[i], b.v[i]); });
}
template <int N>
inline i32x16 shift_left(i32x16 x) {
    return each<i32x16>([&](int i) { return vshlq_n_s32(x.v[i], N); });
}
template <int N>
inline i32x16 shift_right(i32x16 x) {
    return each<i32x16>([&](int i) { return as_i32(vshrq_n_u32(as_u32(x.v[i]), N)); });
}
template <int N>
inline i32x16 shift_right_signed(i32x16 x) {
    return each<i32x16>([&](int i) { return vshrq_n_s32(x.v[i], N); });
}
inline i32x16 max(i32x16 a, i32x16 b) {
    return each<i32x16>([&](int i) { return vmaxq_s32(a.v[i], b.v[i]); });
}
inline i32x16 mul_low(i32x16 a, i32x16 b) {
    return each<i32x16>([&](int i) { return vmulq_s32(a.v[i], b.v[i]); });
}
inline int32x4_t mul_high_of_four(uint32x4_t a, uint32x4_t b) {  // the odd words of the products
    const uint64x2_t low = vmull_u32(vget_low_u32(a), vget_low_u32(b)), high = vmull_high_u32(a, b);
    return as_i32(vuzp2q_u32(vreinterpretq_u32_u64(low), vreinterpretq_u32_u64(high)));
}
inline i32x16 mul_high(i32x16 a, i32x16 b) {
    return each<i32x16>([&](int i) { return mul_high_of_four(as_u32(a.v[i]), as_u32(b.v[i])); });
}

// Conversions -------------------------------------------------------------------------------------------------------

inline f32x16 to_f32(i32x16 x) {
    return each<f32x16>([&](int i) { return vcvtq_f32_s32(x.v[i]); });
}
inline i32x16 to_i32(f32x16 x) {  // fcvtns saturates and makes NaN 0
    return each<i32x16>([&](int i) {
        const uint32x4_t fits = vcltq_f32(x.v[i], vdupq_n_f32(0x1p31f));
        return vbslq_s32(fits, vcvtnq_s32_f32(x.v[i]), vdupq_n_s32(INT32_MIN));
    });
}
inline f32x16 bits_to_f32(i32x16 x) {
    return each<f32x16>([&](int i) { return vreinterpretq_f32_s32(x.v[i]); });
}
inline i32x16 bits_of(f32x16 x) {
    return each<i32x16>([&](int i) { return vreinterpretq_s32_f32(x.v[i]); });
}

inline uint16x4_t load_64(const std::byte* p) {
    return vreinterpret_u16_u8(vld1_u8(reinterpret_cast<const std::uint8_t*>(p)));
}
inline f32x16 load_f16(const std::byte* p) {
    return each<f32x16>([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(load_64(p + 8 * i))); });
}
inline f32x16 load_bf16(const std::byte* p) {
    return each<f32x16>([&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(load_64(p + 8 * i), 16)); });
}
inline uint16x4_t round_to_bf16(float32x4_t x) {
    const uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t sum = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
    return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), sum, vdupq_n_u32(0x7fc00000)), 16);
}
inline void store_bf16(std::byte* p, f32x16 x) {
    for (int i = 0; i < 4; i += 2) {
        const uint16x8_t eight = vcombine_u16(round_to_bf16(x.v[i]), round_to_bf16(x.v[i + 1]));
        store_128(p + 8 * i, vreinterpretq_u8_u16(eight));
    }
}
inline uint8x16_t low_bytes(i32x16 x) {  // the even bytes of the even halves
    const auto low_halves = [&](int i) {
        return vuzp1q_s16(vreinterpretq_s16_s32(x.v[i]), vreinterpretq_s16_s32(x.v[i + 1]));
    };
    return vuzp1q_u8(vreinterpretq_u8_s16(low_halves(0)), vreinterpretq_u8_s16(low_halves(2)));
}
inline void store_low8(std::byte* p, i32x16 a, i32x16 b) {
    store_128(p, low_bytes(a));
    store_128(p + 16, low_bytes(b));
}
inline void store_bf16_in_words(std::byte* p, f32x16 x, int half) {  // there are no masked stores
    std::uint16_t bits[16];
    store_bf16(reinterpret_cast<std::byte*>(bits), x);
    for (int i = 0; i < 16; ++i) std::memcpy(p + 4 * i + 2 * half, bits + i, sizeof bits[i]);
}

// p * 2^n, rounded once, for p near 1 and whole n in [-160, 130]: in two halves, as neither 2^n need be a normal
// number.
inline f32x16 times_power_of_two(f32x16 p, f32x16 n) {
    const i32x16 whole = to_i32(n), half = shift_right_signed<1>(whole);
    const auto power = [](i32x16 exponent) { return bits_to_f32(shift_left<23>(exponent + splat(127))); };
    return p * power(half) * power(whole - half);
}

// Masks -------------------------------------------------------------------------------------------------------------

inline mask16 operator<(f32x16 a, f32x16 b) {
    return each<mask16>([&](int i) { return vcltq_f32(a.v[i], b.v[i]); });
}
inline mask16 operator==(f32x16 a, f32x16 b) {
    return each<mask16>([&](int i) { return vceqq_f32(a.v[i], b.v[i]); });
}
inline mask16 operator<(i32x16 a, i32x16 b) {
    return each<mask16>([&](int i) { return vcltq_s32(a.v[i], b.v[i]); });
}
inline mask16 operator==(i32x16 a, i32x16 b) {
    return each<mask16>([&](int i) { return vceqq_s32(a.v[i], b.v[i]); });
}
inline i32x16 lane_bits() {  // lane i: bit i
    static constexpr std::int32_t kBits[16] = {1,   2,   4,    8,    16,   32,   64,    128,
                                               256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
    return load(kBits);
}
inline std::uint32_t to_bits(mask16 m) {
    const i32x16 bits = lane_bits();
    uint32x4_t set = vdupq_n_u32(0);
    for (int i = 0; i < 4; ++i) set = vorrq_u32(set, vandq_u32(m.v[i], as_u32(bits.v[i])));
    return vaddvq_u32(set);
}
inline mask16 mask_of(std::uint32_t bits) {
    const i32x16 lane = lane_bits(), wanted = splat(static_cast<std::int32_t>(bits));
    return each<mask16>([&](int i) { return vtstq_s32(wanted.v[i], lane.v[i]); });
}
inline mask16 first_lanes(int n) { return mask_of((1u << n) - 1); }
inline f32x16 select(mask16 m, f32x16 a, f32x16 b) {
    return each<f32x16>([&](int i) { return vbslq_f32(m.v[i], a.v[i], b.v[i]); });
}
inline i32x16 select(mask16 m, i32x16 a, i32x16 b) {
    return each<i32x16>([&](int i) { return vbslq_s32(m.v[i], a.v[i], b.v[i]); });
}

// Reductions: the tree of scalar.h ----------------------------------------------------------------------------------

inline float reduce_add(f32x16 x) {
    const float32x4_t four = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline float reduce_max(f32x16 x) {
    const float32x4_t four = max_of_four(max_of_four(x.v[0], x.v[2]), max_of_four(x.v[1], x.v[3]));
    const float32x4_t two = max_of_four(four, vextq_f32(four, four, 2));
    return vgetq_lane_f32(max_of_four(two, vextq_f32(two, two, 1)), 0);
}
inline std::int32_t reduce_add(i32x16 x) {
    return vaddvq_s32(vaddq_s32(vaddq_s32(x.v[0], x.v[1]), vaddq_s32(x.v[2], x.v[3])));
}
inline std::int32_t reduce_max(i32x16 x) {
    return vmaxvq_s32(vmaxq_s32(vmaxq_s32(x.v[0], x.v[1]), vmaxq_s32(x.v[2], x.v[3])));
}

template <class F>
inline i32x16 reduce_four(const i32x16 (&x)[4], F&& f) {
    i32x16 fours;  // four lanes of each
    const auto four_of = [&](const i32x16& it) {
        const i32x16 eight = f(it, i32x16{{it.v[2], it.v[3], it.v[2], it.v[3]}});
        return f(eight, i32x16{{eight.v[1], eight.v[1], eight.v[1], eight.v[1]}}).v[0];
    };
    for (int i = 0; i < 4; ++i) fours.v[i] = four_of(x[i]);
    const auto turned = each<i32x16>([&](int i) { return vextq_s32(fours.v[i], fours.v[i], 2); });
    const i32x16 twos = f(fours, turned);
    return f(twos, each<i32x16>([&](int i) { return vextq_s32(twos.v[i], twos.v[i], 1); }));
}

// Dot products ------------------------------------------------------------------------------------------------------

inline int32x4_t dot8_of_four(int32x4_t acc, int32x4_t w, int32x4_t x) {
    return vdotq_s32(acc, vreinterpretq_s8_s32(w), vreinterpretq_s8_s32(x));
}
inline i32x16 dot8(i32x16 acc, i32x16 w, i32x16 x) {
    return each<i32x16>([&](int i) { return dot8_of_four(acc.v[i], w.v[i], x.v[i]); });
}
inline i32x16 begin_dot4(i32x16 start) { return start; }
inline i32x16 dot4(i32x16 acc, i32x16 w, i32x16 x) { return dot8(acc, w, x); }
inline i32x16 end_dot4(i32x16 acc, i32x16) { return acc; }
// Not bfdot: it rounds to odd, and would give neither the oracle's bits nor AVX-512's.
#include "bf16_halves.inc"

inline void prefetch(const void* p) { __builtin_prefetch(p); }
inline void prefetch_outer(const void* p) { __builtin_prefetch(p, 0, 2); }
inline void prefetch_passing(const void* p) { __builtin_prefetch(p, 0, 0); }
inline void prefetch_to_write(float* p) { __builtin_prefetch(p, 1); }
