// A case: a kernel, its inputs, and how far instruction sets may differ in what comes out.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "../kernels.h"

namespace headrace::conformance {

inline constexpr float kUnit = 0x1p-24f;  // relative error of one f32 rounding

// What a case leaves, as words of 32 bits.
class Output {
public:
    void add(std::span<const float> values) {
        for (const float x : values) {  // processors differ in the NaN that they make
            words_.push_back(x == x ? std::bit_cast<std::uint32_t>(x) : 0x7fc00000u);
        }
    }
    void add(std::span<const std::int32_t> values) { words_.insert(words_.end(), values.begin(), values.end()); }
    void add(std::span<const std::byte> bytes) {  // as they lie: for what may hold no NaN that was computed
        const std::size_t begin = words_.size();
        words_.resize(begin + (bytes.size() + 3) / 4);
        std::memcpy(words_.data() + begin, bytes.data(), bytes.size());
    }

    std::span<const std::uint32_t> words() const { return words_; }

private:
    std::vector<std::uint32_t> words_;
};

// A case's name from its parts. (g++ 12 warns wrongly of `"literal" + std::string`.)
inline std::string join(std::initializer_list<std::string_view> parts) {
    std::string name;
    for (const std::string_view part : parts) {
        if (!name.empty()) name += '/';
        name += part;
    }
    return name;
}

struct Case {
    std::string name;  // kernel/format/shape
    // Throws where what must hold within one instruction set does not.
    std::function<Output(const Kernels&)> run;
    // Where products of bf16 are involved: how far each word, as a float, may be from the oracle's on an instruction
    // set that rounds them in its own way. Without it every set must give the oracle's bits.
    std::function<std::vector<float>(const Kernels& oracle)> bounds = {};
};

void add_linear_cases(std::vector<Case>& cases);
void add_row_cases(std::vector<Case>& cases);
void add_attention_cases(std::vector<Case>& cases);
void add_sample_cases(std::vector<Case>& cases);
void add_program_cases(std::vector<Case>& cases);
void add_thread_cases(std::vector<Case>& cases);  // the same on every instruction set

}  // namespace headrace::conformance
