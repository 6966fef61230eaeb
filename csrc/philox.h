// Philox4x32-10, a counter-based generator: 128 bits of counter and 64 of key give 128 random bits, with no state.
// Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 4.3.
//
// Written once for a word of 32 bits and for vectors of them. Static, so that a copy compiled with an instruction set's
// flags is never the one that the linker keeps for everybody.
#pragma once

#include <cstdint>

namespace headrace {

struct PhiloxKey {
    std::uint32_t low, high;
};

static inline std::uint32_t mul_low(std::uint32_t a, std::uint32_t b) { return a * b; }
static inline std::uint32_t mul_high(std::uint32_t a, std::uint32_t b) { return std::uint64_t(a) * b >> 32; }

// Turns four counter words into four random ones. `splat` makes a Word of a uint32_t; Word has ^, mul_low and mul_high.
template <class Word, class Splat>
static inline void philox4x32_10(Word (&words)[4], PhiloxKey key, Splat splat) {
    const Word multiplier0 = splat(0xD2511F53u), multiplier1 = splat(0xCD9E8D57u);
    for (int round = 0; round < 10; ++round) {
        const Word low0 = mul_low(multiplier0, words[0]), high0 = mul_high(multiplier0, words[0]);
        const Word low1 = mul_low(multiplier1, words[2]), high1 = mul_high(multiplier1, words[2]);
        words[0] = high1 ^ words[1] ^ splat(key.low);
        words[1] = low1;
        words[2] = high0 ^ words[3] ^ splat(key.high);
        words[3] = low0;
        key = {key.low + 0x9E3779B9u, key.high + 0xBB67AE85u};
    }
}

}  // namespace headrace
