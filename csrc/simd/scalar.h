// The primitives that kernels are written in, one lane at a time: the oracle of the other instruction sets.
//
// Every simd/<isa>.h has the same names and, but for dot_bf16, gives the same bits. Included once into an anonymous
// namespace of isa.cpp. 16 lanes everywhere, so that kernels have one structure; loads and stores need no alignment.
// min and max give their second operand where either is NaN, as x86 does.
inline constexpr const char* kIsaName = "scalar";
inline constexpr int kWeightOffset8 = 0;  // what dot8 wants added to signed 8-bit weights
inline constexpr int kGemmRows = 4;       // register tile of gemm: rows x weight tiles
inline constexpr int kGemmFloatRows = 4;  // where the sums need no integer accumulators
inline constexpr int kGemmTiles = 1;
inline constexpr int kGemmFewRows = 4;    // rows up to which gemm takes one tile at a time
inline constexpr int kAttendRows = 4;     // register tile of attention: rows that share a load of K or V
inline constexpr int kAttendVectors = 4;  // and vectors of scores, or of the output
inline constexpr int kSoftenRows = 2;     // rows whose weights are computed in step: what registers hold

struct f32x16 {
    float lane[16];
};
struct i32x16 {
    std::int32_t lane[16];
};
struct mask16 {
    bool lane[16];
};

template <class Result, class F>
inline Result each(F&& f) {
    Result out;
    for (int i = 0; i < 16; ++i) out.lane[i] = f(i);
    return out;
}

inline std::uint32_t u32(std::int32_t x) { return static_cast<std::uint32_t>(x); }
inline std::int32_t i32(std::uint32_t x) { return static_cast<std::int32_t>(x); }
inline float f32_from_bits(std::int32_t bits) { return std::bit_cast<float>(bits); }
inline std::int32_t f32_bits(float x) { return std::bit_cast<std::int32_t>(x); }

// f32 ---------------------------------------------------------------------------------------------------------------

inline f32x16 splat(float x) {
    return each<f32x16>([&](int) { return x; });
}
inline f32x16 load(const float* p) {
    return each<f32x16>([&](int i) { return p[i]; });
}
inline f32x16 load_first(const float* p, int n) {  // lanes n.. are 0 and are not read
    return each<f32x16>([&](int i) { return i < n ? p[i] : 0.0f; });
}
inline void store(float* p, f32x16 x) { std::memcpy(p, x.lane, sizeof x.lane); }
inline void store_first(float* p, f32x16 x, int n) { std::memcpy(p, x.lane, n * sizeof(float)); }

inline f32x16 operator+(f32x16 a, f32x16 b) {
    return each<f32x16>([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline f32x16 operator-(f32x16 a, f32x16 b) {
    return each<f32x16>([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline f32x16 operator*(f32x16 a, f32x16 b) {
    return each<f32x16>([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline f32x16 operator/(f32x16 a, f32x16 b) {
    return each<f32x16>([&](int i) { return a.lane[i] / b.lane[i]; });
}
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {  // a * b + c, rounded once
    return each<f32x16>([&](int i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
}
inline f32x16 min(f32x16 a, f32x16 b) {
    return each<f32x16>([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline f32x16 max(f32x16 a, f32x16 b) {
    return each<f32x16>([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline f32x16 round_even(f32x16 x) {
    return each<f32x16>([&](int i) { return std::nearbyintf(x.lane[i]); });
}

// i32; also a bag of 64 bytes or 32 bf16 ----------------------------------------------------------------------------

inline i32x16 splat(std::int32_t x) {
    return each<i32x16>([&](int) { return x; });
}
inline i32x16 load(const std::int32_t* p) {
    return each<i32x16>([&](int i) { return p[i]; });
}
inline i32x16 load_bytes(const std::byte* p) {
    i32x16 out;
    std::memcpy(out.lane, p, sizeof out.lane);
    return out;
}
inline i32x16 splat_bytes(const std::byte* p) {  // the 4 bytes at p, in every lane
    std::int32_t word;
    std::memcpy(&word, p, sizeof word);
    return splat(word);
}
inline void store(std::int32_t* p, i32x16 x) { std::memcpy(p, x.lane, sizeof x.lane); }

inline i32x16 operator+(i32x16 a, i32x16 b) {  // wraps
    return each<i32x16>([&](int i) { return i32(u32(a.lane[i]) + u32(b.lane[i])); });
}
inline i32x16 operator-(i32x16 a, i32x16 b) {
    return each<i32x16>([&](int i) { return i32(u32(a.lane[i]) - u32(b.lane[i])); });
}
inline i32x16 operator&(i32x16 a, i32x16 b) {
    return each<i32x16>([&](int i) { return a.lane[i] & b.lane[i]; });
}
inline i32x16 operator|(i32x16 a, i32x16 b) {
    return each<i32x16>([&](int i) { return a.lane[i] | b.lane[i]; });
}
inline i32x16 operator^(i32x16 a, i32x16 b) {
    return each<i32x16>([&](int i) { return a.lane[i] ^ b.lane[i]; });
}
template <int N>
inline i32x16 shift_left(i32x16 x) {
    return each<i32x16>([&](int i) { return i32(u32(x.lane[i]) << N); });
}
template <int N>
inline i32x16 shift_right(i32x16 x) {  // zeros come in
    return each<i32x16>([&](int i) { return i32(u32(x.lane[i]) >> N); });
}
template <int N>
inline i32x16 shift_right_signed(i32x16 x) {
    return each<i32x16>([&](int i) { return x.lane[i] >> N; });
}
inline i32x16 max(i32x16 a, i32x16 b) {
    return each<i32x16>([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline i32x16 mul_low(i32x16 a, i32x16 b) {  // the low and the high half of unsigned 32 x 32 -> 64 bits
    return each<i32x16>([&](int i) { return i32(u32(a.lane[i]) * u32(b.lane[i])); });
}
inline i32x16 mul_high(i32x16 a, i32x16 b) {
    return each<i32x16>([&](int i) { return i32(std::uint64_t(u32(a.lane[i])) * u32(b.lane[i]) >> 32); });
}

// Conversions -------------------------------------------------------------------------------------------------------

inline f32x16 to_f32(i32x16 x) {
    return each<f32x16>([&](int i) { return static_cast<float>(x.lane[i]); });
}
inline i32x16 to_i32(f32x16 x) {  // to nearest even; INT_MIN where it does not fit
    return each<i32x16>([&](int i) {
        const float r = std::nearbyintf(x.lane[i]);
        return r >= -2147483648.0f && r < 2147483648.0f ? static_cast<std::int32_t>(r) : INT32_MIN;
    });
}
inline f32x16 bits_to_f32(i32x16 x) { return std::bit_cast<f32x16>(x); }
inline i32x16 bits_of(f32x16 x) { return std::bit_cast<i32x16>(x); }

inline float half_to_f32(std::uint16_t half) {
    const std::uint32_t sign = std::uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 0x1f,
                        mantissa = half & 0x3ff;
    if (exponent == 0) {  // subnormal: mantissa * 2^-24, exact
        const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    const std::uint32_t wide = exponent == 31 ? 255 : exponent + 112;
    const std::uint32_t quiet = exponent == 31 && mantissa ? 0x400000 : 0;
    return std::bit_cast<float>(sign | wide << 23 | mantissa << 13 | quiet);
}
inline f32x16 load_f16(const std::byte* p) {
    return each<f32x16>([&](int i) {
        std::uint16_t half;
        std::memcpy(&half, p + 2 * i, sizeof half);
        return half_to_f32(half);
    });
}
inline f32x16 load_bf16(const std::byte* p) {
    return each<f32x16>([&](int i) {
        std::uint16_t top;
        std::memcpy(&top, p + 2 * i, sizeof top);
        return std::bit_cast<float>(std::uint32_t(top) << 16);
    });
}
// To nearest even; NaN stays NaN. Subnormal numbers may become 0: AVX-512's instruction flushes them, as does its
// dot_bf16.
inline void store_bf16(std::byte* p, f32x16 x) {
    for (int i = 0; i < 16; ++i) {
        const std::uint32_t bits = u32(f32_bits(x.lane[i]));
        const std::uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        const auto half = static_cast<std::uint16_t>(x.lane[i] == x.lane[i] ? rounded : 0x7fc0);
        std::memcpy(p + 2 * i, &half, sizeof half);
    }
}
inline void store_low8(std::byte* p, i32x16 a, i32x16 b) {  // the low bytes of a's lanes, then of b's
    for (int i = 0; i < 16; ++i) p[i] = static_cast<std::byte>(a.lane[i]);
    for (int i = 0; i < 16; ++i) p[16 + i] = static_cast<std::byte>(b.lane[i]);
}
// bf16 into half `half` (0: the low one) of 16 words, whose other halves are left alone: another thread may write them.
inline void store_bf16_in_words(std::byte* p, f32x16 x, int half) {
    std::byte bits[2 * 16];
    store_bf16(bits, x);
    for (int i = 0; i < 16; ++i) std::memcpy(p + 4 * i + 2 * half, bits + 2 * i, 2);
}

// p * 2^n, rounded once, for p near 1 and whole n in [-160, 130]: in two halves, as neither 2^n need be a normal
// number.
inline f32x16 times_power_of_two(f32x16 p, f32x16 n) {
    const i32x16 whole = to_i32(n), half = shift_right_signed<1>(whole);
    const auto power = [](i32x16 exponent) { return bits_to_f32(shift_left<23>(exponent + splat(127))); };
    return p * power(half) * power(whole - half);
}

// Masks -------------------------------------------------------------------------------------------------------------

inline mask16 first_lanes(int n) {
    return each<mask16>([&](int i) { return i < n; });
}
inline mask16 operator<(f32x16 a, f32x16 b) {  // false for NaN
    return each<mask16>([&](int i) { return a.lane[i] < b.lane[i]; });
}
inline mask16 operator==(f32x16 a, f32x16 b) {
    return each<mask16>([&](int i) { return a.lane[i] == b.lane[i]; });
}
inline mask16 operator<(i32x16 a, i32x16 b) {
    return each<mask16>([&](int i) { return a.lane[i] < b.lane[i]; });
}
inline mask16 operator==(i32x16 a, i32x16 b) {
    return each<mask16>([&](int i) { return a.lane[i] == b.lane[i]; });
}
inline std::uint32_t to_bits(mask16 m) {  // bit i: lane i
    std::uint32_t bits = 0;
    for (int i = 0; i < 16; ++i) bits |= std::uint32_t(m.lane[i]) << i;
    return bits;
}
inline mask16 mask_of(std::uint32_t bits) {
    return each<mask16>([&](int i) { return (bits >> i & 1) != 0; });
}
inline f32x16 select(mask16 m, f32x16 a, f32x16 b) {  // m ? a : b
    return each<f32x16>([&](int i) { return m.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline i32x16 select(mask16 m, i32x16 a, i32x16 b) {
    return each<i32x16>([&](int i) { return m.lane[i] ? a.lane[i] : b.lane[i]; });
}

// Reductions: one tree on every instruction set, lanes i and i + 8, then 4, 2, 1 ------------------------------------

template <class Vector, class F>
inline auto reduce(Vector x, F&& f) {
    for (int half = 8; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) x.lane[i] = f(x.lane[i], x.lane[i + half]);
    }
    return x.lane[0];
}
inline float reduce_add(f32x16 x) {
    return reduce(x, [](float a, float b) { return a + b; });
}
inline float reduce_max(f32x16 x) {
    return reduce(x, [](float a, float b) { return a > b ? a : b; });
}
inline std::int32_t reduce_add(i32x16 x) {
    return reduce(x, [](std::int32_t a, std::int32_t b) { return i32(u32(a) + u32(b)); });
}
inline std::int32_t reduce_max(i32x16 x) {
    return reduce(x, [](std::int32_t a, std::int32_t b) { return a > b ? a : b; });
}
// Lanes 4 i to 4 i + 3: the reduction of x[i] by f, which must be exact: each set has its own order.
template <class F>
inline i32x16 reduce_four(const i32x16 (&x)[4], F&& f) {
    i32x16 out = each<i32x16>([&](int i) { return x[i / 4].lane[0]; });
    for (int lane = 1; lane < 16; ++lane) out = f(out, each<i32x16>([&](int i) { return x[i / 4].lane[lane]; }));
    return out;
}

// Dot products: lane i of `acc` gains the products of the 4 bytes (2 bf16) in lane i of w and x ----------------------

// 8-bit weights, kWeightOffset8 added, by signed activations in [-127, 127]. Exact.
inline i32x16 dot8(i32x16 acc, i32x16 w, i32x16 x) {
    const auto weights = std::bit_cast<std::array<std::int8_t, 64>>(w);
    const auto inputs = std::bit_cast<std::array<std::int8_t, 64>>(x);
    for (int i = 0; i < 64; ++i) acc.lane[i / 4] += weights[i] * inputs[i];
    return acc;
}
// The same for weights in [0, 15], which have no offset: begin_dot4, one dot4 for each of the 8 quads of a group,
// end_dot4, so that the sums may be narrower until then; `start` is what they begin at.
inline i32x16 begin_dot4(i32x16 start) { return start; }
inline i32x16 dot4(i32x16 acc, i32x16 w, i32x16 x) { return dot8(acc, w, x); }
inline i32x16 end_dot4(i32x16 acc, i32x16) { return acc; }

#include "bf16_halves.inc"

inline void prefetch(const void*) {}
inline void prefetch_passing(const void*) {}  // what nothing reads again before the caches have forgotten it
inline void prefetch_outer(const void*) {}    // not into the innermost cache
inline void prefetch_to_write(float*) {}      // without a copy of it that other cores keep
