// Inputs that are the same on every machine: integers from SplitMix64, made into floats by exact operations alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <span>

#include "../kernels.h"

namespace headrace::conformance {

// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
class Random {
public:
    explicit Random(std::uint64_t seed) : state_(seed) {}

    std::uint64_t bits() {
        std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }
    int below(int count) { return int(bits() % std::uint64_t(count)); }
    // In [-1, 1).
    float uniform() { return float(std::int32_t(bits() >> 39) - (1 << 24)) * 0x1p-24f; }
    // Near to normal, deviation 1.15, magnitude at most 4: the sum of four uniform 16-bit integers.
    float normal() {
        const std::uint64_t word = bits();
        std::int32_t sum = 0;
        for (int i = 0; i < 64; i += 16) sum += std::int32_t(word >> i & 0xffff);
        return float(sum - 2 * 0xffff) * 0x1p-15f;
    }

private:
    std::uint64_t state_;
};

// Aligned memory of exactly the size asked for, so that sanitizers see its ends. Begins as NaN (all bits ones).
template <class T>
class Array {
public:
    explicit Array(std::size_t size)
        : size_(size), memory_(static_cast<T*>(::operator new(size * sizeof(T), std::align_val_t(kAlign)))) {
        std::memset(static_cast<void*>(memory_.get()), 0xff, size * sizeof(T));
    }

    T* data() const { return memory_.get(); }
    std::size_t size() const { return size_; }
    T& operator[](std::size_t i) const { return memory_.get()[i]; }
    T* begin() const { return data(); }
    T* end() const { return data() + size_; }
    std::span<const T> all() const { return {data(), size_}; }

private:
    struct Delete {
        void operator()(T* memory) const { ::operator delete(memory, std::align_val_t(kAlign)); }
    };
    std::size_t size_;
    std::unique_ptr<T, Delete> memory_;
};

inline Array<float> normal_floats(std::size_t size, std::uint64_t seed) {
    Array<float> out(size);
    Random random(seed);
    for (float& x : out) x = random.normal();
    return out;
}

// The bytes of a weight [rows, cols] as model files hold it.
Array<std::byte> file_weight(Format format, int rows, int cols, std::uint64_t seed);  // linear.cpp

}  // namespace headrace::conformance
