// The primitives of simd/scalar.h on AVX2 with FMA and F16C: two registers per vector.
inline constexpr const char* kIsaName = "avx2";
inline constexpr int kWeightOffset8 = 0;  // dot8 moves the weight's sign to the input
// 4 rows x 1 tile of two registers each: 8 accumulators. Of block formats the f32 sums lie in memory meanwhile.
inline constexpr int kGemmRows = 4;
inline constexpr int kGemmFloatRows = 4;
inline constexpr int kGemmTiles = 1;
inline constexpr int kGemmFewRows = 4;  // rows that take one tile at a time
// 4 rows x 1 vector: 8 accumulators, 4 of one K or V in f32
inline constexpr int kAttendRows = 4;
inline constexpr int kAttendVectors = 1;
inline constexpr int kSoftenRows = 1;  // its four vectors, and what exp makes of them, fill the registers

struct f32x16 {
    __m256 lo, hi;
};
struct i32x16 {
    __m256i lo, hi;
};
struct mask16 {  // all ones where true
    __m256 lo, hi;
};

inline __m256i load_256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m128i load_128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline __m256 as_ps(__m256i x) { return _mm256_castsi256_ps(x); }
inline __m256i as_int(__m256 x) { return _mm256_castps_si256(x); }

// f32 ---------------------------------------------------------------------------------------------------------------

inline __m256i first_of_eight(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline f32x16 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline f32x16 load_first(const float* p, int n) {
    return {_mm256_maskload_ps(p, first_of_eight(n)), _mm256_maskload_ps(p + 8, first_of_eight(n - 8))};
}
inline void store(float* p, f32x16 x) {
    _mm256_storeu_ps(p, x.lo);
    _mm256_storeu_ps(p + 8, x.hi);
}
inline void store_first(float* p, f32x16 x, int n) {
    _mm256_maskstore_ps(p, first_of_eight(n), x.lo);
    _mm256_maskstore_ps(p + 8, first_of_eight(n - 8), x.hi);
}

inline f32x16 operator+(f32x16 a, f32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline f32x16 operator-(f32x16 a, f32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline f32x16 operator*(f32x16 a, f32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline f32x16 operator/(f32x16 a, f32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline f32x16 min(f32x16 a, f32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline f32x16 max(f32x16 a, f32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline f32x16 round_even(f32x16 x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.lo, mode), _mm256_round_ps(x.hi, mode)};
}

// i32 ---------------------------------------------------------------------------------------------------------------

inline i32x16 splat(std::int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline i32x16 load(const std::int32_t* p) { return {load_256(p), load_256(p + 8)}; }
inline i32x16 load_bytes(const std::byte* p) { return {load_256(p), load_256(p + 32)}; }
inline i32x16 splat_bytes(const std::byte* p) {
    std::int32_t word;
    std::memcpy(&word, p, sizeof word);
    return splat(word);
}
inline void store(std::int32_t* p, i32x16 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.lo);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.hi);
}

inline i32x16 operator+(i32x16 a, i32x16 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline i32x16 operator-(i32x16 a, i32x16 b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
inline i32x16 operator&(i32x16 a, i32x16 b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
inline i32x16 operator|(i32x16 a, i32x16 b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
inline i32x16 operator^(i32x16 a, i32x16 b) { return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)}; }
template <int N>
inline i32x16 shift_left(i32x16 x) {
    return {_mm256_slli_epi32(x.lo, N), _mm256_slli_epi32(x.hi, N)};
}
template <int N>
inline i32x16 shift_right(i32x16 x) {
    return {_mm256_srli_epi32(x.lo, N), _mm256_srli_epi32(x.hi, N)};
}
template <int N>
inline i32x16 shift_right_signed(i32x16 x) {
    return {_mm256_srai_epi32(x.lo, N), _mm256_srai_epi32(x.hi, N)};
}
inline i32x16 max(i32x16 a, i32x16 b) { return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)}; }
inline i32x16 mul_low(i32x16 a, i32x16 b) { return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)}; }
inline __m256i mul_high_of_eight(__m256i a, __m256i b) {
    const __m256i even = _mm256_mul_epu32(a, b);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
    return _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
}
inline i32x16 mul_high(i32x16 a, i32x16 b) { return {mul_high_of_eight(a.lo, b.lo), mul_high_of_eight(a.hi, b.hi)}; }

// Conversions -------------------------------------------------------------------------------------------------------

inline f32x16 to_f32(i32x16 x) { return {_mm256_cvtepi32_ps(x.lo), _mm256_cvtepi32_ps(x.hi)}; }
inline i32x16 to_i32(f32x16 x) {
    const f32x16 rounded = round_even(x);
    return {_mm256_cvttps_epi32(rounded.lo), _mm256_cvttps_epi32(rounded.hi)};
}
inline f32x16 bits_to_f32(i32x16 x) { return {as_ps(x.lo), as_ps(x.hi)}; }
inline i32x16 bits_of(f32x16 x) { return {as_int(x.lo), as_int(x.hi)}; }

inline f32x16 load_f16(const std::byte* p) { return {_mm256_cvtph_ps(load_128(p)), _mm256_cvtph_ps(load_128(p + 16))}; }
inline f32x16 load_bf16(const std::byte* p) {
    const __m256i lo = _mm256_cvtepu16_epi32(load_128(p)), hi = _mm256_cvtepu16_epi32(load_128(p + 16));
    return {as_ps(_mm256_slli_epi32(lo, 16)), as_ps(_mm256_slli_epi32(hi, 16))};
}
inline __m256i pack_16(__m256i lo, __m256i hi) {  // 16 numbers below 2^16 in 16 bits each, in order
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(lo, hi), _MM_SHUFFLE(3, 1, 2, 0));
}
inline __m256i round_to_bf16(__m256 x) {
    const __m256i bits = as_int(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i is_nan = as_int(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(0x7fc0), is_nan);
}
inline void store_bf16(std::byte* p, f32x16 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), pack_16(round_to_bf16(x.lo), round_to_bf16(x.hi)));
}
inline void store_low8(std::byte* p, i32x16 a, i32x16 b) {
    const i32x16 byte = splat(0xff), low_a = a & byte, low_b = b & byte;
    const __m256i words_a = _mm256_packus_epi32(low_a.lo, low_a.hi), words_b = _mm256_packus_epi32(low_b.lo, low_b.hi);
    const __m256i quads = _mm256_packus_epi16(words_a, words_b);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm256_permutevar8x32_epi32(quads, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
}
inline void store_bf16_in_words(std::byte* p, f32x16 x, int half) {
    alignas(32) std::uint16_t bits[16];
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

inline mask16 first_lanes(int n) { return {as_ps(first_of_eight(n)), as_ps(first_of_eight(n - 8))}; }
inline mask16 operator<(f32x16 a, f32x16 b) {
    return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}
inline mask16 operator==(f32x16 a, f32x16 b) {
    return {_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ)};
}
inline mask16 operator<(i32x16 a, i32x16 b) {
    return {as_ps(_mm256_cmpgt_epi32(b.lo, a.lo)), as_ps(_mm256_cmpgt_epi32(b.hi, a.hi))};
}
inline mask16 operator==(i32x16 a, i32x16 b) {
    return {as_ps(_mm256_cmpeq_epi32(a.lo, b.lo)), as_ps(_mm256_cmpeq_epi32(a.hi, b.hi))};
}
inline std::uint32_t to_bits(mask16 m) { return _mm256_movemask_ps(m.lo) | _mm256_movemask_ps(m.hi) << 8; }
inline mask16 mask_of(std::uint32_t bits) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i lo = _mm256_and_si256(_mm256_set1_epi32(bits), lane);
    const __m256i hi = _mm256_and_si256(_mm256_set1_epi32(bits >> 8), lane);
    return {as_ps(_mm256_cmpeq_epi32(lo, lane)), as_ps(_mm256_cmpeq_epi32(hi, lane))};
}
inline f32x16 select(mask16 m, f32x16 a, f32x16 b) {
    return {_mm256_blendv_ps(b.lo, a.lo, m.lo), _mm256_blendv_ps(b.hi, a.hi, m.hi)};
}
inline i32x16 select(mask16 m, i32x16 a, i32x16 b) { return bits_of(select(m, bits_to_f32(a), bits_to_f32(b))); }

// Reductions: the tree of scalar.h ----------------------------------------------------------------------------------

inline float reduce_add(f32x16 x) {
    const __m256 eight = _mm256_add_ps(x.lo, x.hi);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float reduce_max(f32x16 x) {
    const __m256 eight = _mm256_max_ps(x.lo, x.hi);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline std::int32_t reduce_add(i32x16 x) {
    const __m256i eight = _mm256_add_epi32(x.lo, x.hi);
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(1, 0, 3, 2)));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, _MM_SHUFFLE(2, 3, 0, 1))));
}
inline std::int32_t reduce_max(i32x16 x) {
    const __m256i eight = _mm256_max_epi32(x.lo, x.hi);
    const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, _MM_SHUFFLE(1, 0, 3, 2)));
    return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, _MM_SHUFFLE(2, 3, 0, 1))));
}

template <class F>
inline i32x16 reduce_four(const i32x16 (&x)[4], F&& f) {
    const auto low = [](__m256i a, __m256i b) { return _mm256_permute2x128_si256(a, b, 0x20); };
    const auto high = [](__m256i a, __m256i b) { return _mm256_permute2x128_si256(a, b, 0x31); };
    const i32x16 ab = f(i32x16{x[0].lo, x[1].lo}, i32x16{x[0].hi, x[1].hi});
    const i32x16 cd = f(i32x16{x[2].lo, x[3].lo}, i32x16{x[2].hi, x[3].hi});
    i32x16 all = f(i32x16{low(ab.lo, ab.hi), low(cd.lo, cd.hi)}, i32x16{high(ab.lo, ab.hi), high(cd.lo, cd.hi)});
    all = f(all, i32x16{_mm256_shuffle_epi32(all.lo, 0x4e), _mm256_shuffle_epi32(all.hi, 0x4e)});
    return f(all, i32x16{_mm256_shuffle_epi32(all.lo, 0xb1), _mm256_shuffle_epi32(all.hi, 0xb1)});
}

// Dot products ------------------------------------------------------------------------------------------------------

// A sum that takes its terms one by one. Without it g++ computes a group's products first, which registers cannot hold,
// and then adds them up as a tree.
inline __m256i in_order(__m256i sum) {
    asm("" : "+x"(sum));
    return sum;
}
inline __m256i sum_pairs(__m256i acc, __m256i words) {
    return in_order(_mm256_add_epi32(acc, _mm256_madd_epi16(words, _mm256_set1_epi16(1))));
}
// vpmaddubsw adds two products in 16 bits: |w| <= 128 and |x| <= 127 make 32,512 at most, so it never saturates.
inline __m256i dot8_of_eight(__m256i acc, __m256i w, __m256i x) {
    return sum_pairs(acc, _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)));
}
inline i32x16 dot8(i32x16 acc, i32x16 w, i32x16 x) {
    return {dot8_of_eight(acc.lo, w.lo, x.lo), dot8_of_eight(acc.hi, w.hi, x.hi)};
}
// Sums of 8 quads stay in 16 bits, two of them in a lane: 8 * 2 * 15 * 127 = 30,480 at most.
inline i32x16 begin_dot4(i32x16) { return splat(0); }
inline i32x16 dot4(i32x16 acc, i32x16 w, i32x16 x) {
    return {in_order(_mm256_add_epi16(acc.lo, _mm256_maddubs_epi16(w.lo, x.lo))),
            in_order(_mm256_add_epi16(acc.hi, _mm256_maddubs_epi16(w.hi, x.hi)))};
}
inline i32x16 end_dot4(i32x16 acc, i32x16 start) { return {sum_pairs(start.lo, acc.lo), sum_pairs(start.hi, acc.hi)}; }
#include "bf16_halves.inc"

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
inline void prefetch_outer(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
inline void prefetch_passing(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_NTA); }
// Not __builtin_prefetch(p, 1): without -mprfchw that only reads.
inline void prefetch_to_write(float* p) { asm volatile("prefetchw %0" : : "m"(*p)); }
