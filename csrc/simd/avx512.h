// The primitives of simd/scalar.h on AVX-512 (F, BW, VL, DQ) with VNNI and BF16: one register per vector.
inline constexpr const char* kIsaName = "avx512";
inline constexpr int kWeightOffset8 = 128;  // vpdpbusd multiplies unsigned by signed
// 6 rows x 2 tiles: 12 f32 and 12 integer accumulators, 2 weights and 1 broadcast input of 32 registers.
inline constexpr int kGemmRows = 6;
inline constexpr int kGemmFloatRows = 8;
inline constexpr int kGemmTiles = 2;
inline constexpr int kGemmFewRows = 8;  // rows that take one tile at a time: 8 chains of products hide their latency
// 6 rows x 4 vectors: 24 accumulators, 4 of K or V, 1 broadcast query
inline constexpr int kAttendRows = 6;
inline constexpr int kAttendVectors = 4;
inline constexpr int kSoftenRows = 2;

struct f32x16 {
    __m512 v;
};
struct i32x16 {
    __m512i v;
};
struct mask16 {
    __mmask16 v;
};

// f32 ---------------------------------------------------------------------------------------------------------------

inline f32x16 splat(float x) { return {_mm512_set1_ps(x)}; }
inline f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline f32x16 load_first(const float* p, int n) { return {_mm512_maskz_loadu_ps((1u << n) - 1, p)}; }
inline void store(float* p, f32x16 x) { _mm512_storeu_ps(p, x.v); }
inline void store_first(float* p, f32x16 x, int n) { _mm512_mask_storeu_ps(p, (1u << n) - 1, x.v); }

inline f32x16 operator+(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline f32x16 operator-(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline f32x16 operator*(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline f32x16 operator/(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline f32x16 round_even(f32x16 x) {
    return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

// i32 ---------------------------------------------------------------------------------------------------------------

inline i32x16 splat(std::int32_t x) { return {_mm512_set1_epi32(x)}; }
inline i32x16 load(const std::int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline i32x16 load_bytes(const std::byte* p) { return {_mm512_loadu_si512(p)}; }
inline i32x16 splat_bytes(const std::byte* p) {
    std::int32_t word;
    std::memcpy(&word, p, sizeof word);
    return splat(word);
}
inline void store(std::int32_t* p, i32x16 x) { _mm512_storeu_si512(p, x.v); }

inline i32x16 operator+(i32x16 a, i32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline i32x16 operator-(i32x16 a, i32x16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline i32x16 operator&(i32x16 a, i32x16 b) { return {_mm512_and_si512(a.v, b.v)}; }
inline i32x16 operator|(i32x16 a, i32x16 b) { return {_mm512_or_si512(a.v, b.v)}; }
inline i32x16 operator^(i32x16 a, i32x16 b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int N>
inline i32x16 shift_left(i32x16 x) {
    return {_mm512_slli_epi32(x.v, N)};
}
template <int N>
inline i32x16 shift_right(i32x16 x) {
    return {_mm512_srli_epi32(x.v, N)};
}
template <int N>
inline i32x16 shift_right_signed(i32x16 x) {
    return {_mm512_srai_epi32(x.v, N)};
}
inline i32x16 max(i32x16 a, i32x16 b) { return {_mm512_max_epi32(a.v, b.v)}; }
inline i32x16 mul_low(i32x16 a, i32x16 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline i32x16 mul_high(i32x16 a, i32x16 b) {
    const __m512i even = _mm512_mul_epu32(a.v, b.v);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a.v, 32), _mm512_srli_epi64(b.v, 32));
    return {_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd)};
}

// Conversions -------------------------------------------------------------------------------------------------------

inline f32x16 to_f32(i32x16 x) { return {_mm512_cvtepi32_ps(x.v)}; }
inline i32x16 to_i32(f32x16 x) {
    return {_mm512_cvt_roundps_epi32(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline f32x16 bits_to_f32(i32x16 x) { return {_mm512_castsi512_ps(x.v)}; }
inline i32x16 bits_of(f32x16 x) { return {_mm512_castps_si512(x.v)}; }

inline f32x16 load_f16(const std::byte* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline f32x16 load_bf16(const std::byte* p) {
    const __m256i top = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(top), 16))};
}
inline void store_bf16(std::byte* p, f32x16 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), std::bit_cast<__m256i>(_mm512_cvtneps_pbh(x.v)));
}
// One pair of numbers for all lanes, as dot_bf16 wants it.
using Bf16Pair = std::int32_t;
inline void store_pairs(Bf16Pair* to, f32x16 x) { store_bf16(reinterpret_cast<std::byte*>(to), x); }
inline void store_pairs(Bf16Pair* to, f32x16 x, f32x16 y) {
    store(to, i32x16{std::bit_cast<__m512i>(_mm512_cvtne2ps_pbh(y.v, x.v))});
}
inline void store_low8(std::byte* p, i32x16 a, i32x16 b) {
    alignas(64) static constexpr auto kLowWords = [] {
        std::array<std::uint16_t, 32> words{};
        for (std::uint16_t i = 0; i < 32; ++i) words[i] = 2 * i;
        return words;
    }();
    const __m512i words = _mm512_permutex2var_epi16(a.v, _mm512_load_si512(kLowWords.data()), b.v);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi16_epi8(words));
}
inline void store_bf16_in_words(std::byte* p, f32x16 x, int half) {
    const __m512i bits = _mm512_cvtepu16_epi32(std::bit_cast<__m256i>(_mm512_cvtneps_pbh(x.v)));
    _mm512_mask_storeu_epi16(p, 0x55555555u << half, _mm512_sll_epi32(bits, _mm_cvtsi32_si128(16 * half)));
}
inline f32x16 times_power_of_two(f32x16 p, f32x16 n) { return {_mm512_scalef_ps(p.v, n.v)}; }

// Masks -------------------------------------------------------------------------------------------------------------

inline mask16 first_lanes(int n) { return {static_cast<__mmask16>((1u << n) - 1)}; }
inline mask16 operator<(f32x16 a, f32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
inline mask16 operator==(f32x16 a, f32x16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
inline mask16 operator<(i32x16 a, i32x16 b) { return {_mm512_cmplt_epi32_mask(a.v, b.v)}; }
inline mask16 operator==(i32x16 a, i32x16 b) { return {_mm512_cmpeq_epi32_mask(a.v, b.v)}; }
inline std::uint32_t to_bits(mask16 m) { return m.v; }
inline mask16 mask_of(std::uint32_t bits) { return {static_cast<__mmask16>(bits)}; }
inline f32x16 select(mask16 m, f32x16 a, f32x16 b) { return {_mm512_mask_blend_ps(m.v, b.v, a.v)}; }
inline i32x16 select(mask16 m, i32x16 a, i32x16 b) { return {_mm512_mask_blend_epi32(m.v, b.v, a.v)}; }

// Reductions: the tree of scalar.h (the order of _mm512_reduce_add_ps is the compiler's own) -------------------------

inline float reduce_add(f32x16 x) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float reduce_max(f32x16 x) {
    const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline std::int32_t reduce_add(i32x16 x) { return _mm512_reduce_add_epi32(x.v); }
inline std::int32_t reduce_max(i32x16 x) { return _mm512_reduce_max_epi32(x.v); }

template <class F>
inline i32x16 reduce_four(const i32x16 (&x)[4], F&& f) {
    const auto halves = [&](i32x16 a, i32x16 b) {  // [a, a, b, b] in blocks of 4 lanes
        return f(i32x16{_mm512_shuffle_i32x4(a.v, b.v, 0x44)}, i32x16{_mm512_shuffle_i32x4(a.v, b.v, 0xee)});
    };
    const i32x16 ab = halves(x[0], x[1]), cd = halves(x[2], x[3]);
    i32x16 all = f(i32x16{_mm512_shuffle_i32x4(ab.v, cd.v, 0x88)}, i32x16{_mm512_shuffle_i32x4(ab.v, cd.v, 0xdd)});
    all = f(all, i32x16{_mm512_shuffle_epi32(all.v, _MM_PERM_BADC)});
    return f(all, i32x16{_mm512_shuffle_epi32(all.v, _MM_PERM_CDAB)});
}

// Dot products ------------------------------------------------------------------------------------------------------

inline i32x16 dot8(i32x16 acc, i32x16 w, i32x16 x) { return {_mm512_dpbusd_epi32(acc.v, w.v, x.v)}; }
inline i32x16 begin_dot4(i32x16 start) { return start; }
inline i32x16 dot4(i32x16 acc, i32x16 w, i32x16 x) { return dot8(acc, w, x); }
inline i32x16 end_dot4(i32x16 acc, i32x16) { return acc; }
template <int R>
struct Bf16Inputs {
    const std::byte* const (&rows)[R];
    i32x16 at(int r, int k) const { return splat_bytes(rows[r] + 4 * k); }
};
inline f32x16 dot_bf16(f32x16 acc, i32x16 w, i32x16 x) {
    return {_mm512_dpbf16_ps(acc.v, std::bit_cast<__m512bh>(w.v), std::bit_cast<__m512bh>(x.v))};
}

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
inline void prefetch_outer(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
inline void prefetch_passing(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_NTA); }
// Not __builtin_prefetch(p, 1): without -mprfchw that only reads.
inline void prefetch_to_write(float* p) { asm volatile("prefetchw %0" : : "m"(*p)); }
