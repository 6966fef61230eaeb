#include "bandwidth.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "memory.h"

namespace headrace {
namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kClaimBytes = 1 << 20;  // long beside what claiming costs, short beside a pass

// One word of each cache line: all of the line comes from memory, and adding words cannot be what takes the time.
std::uint64_t read_lines(const std::byte* begin, const std::byte* end) {
    std::uint64_t sums[4] = {};
    for (; begin < end; begin += 4 * kLine) {
        for (int i = 0; i < 4; ++i) {
            std::uint64_t word;
            std::memcpy(&word, begin + i * kLine, sizeof word);
            sums[i] += word;
        }
    }
    return sums[0] + sums[1] + sums[2] + sums[3];
}

}  // namespace

std::vector<double> read_bandwidth(ThreadPool& pool, std::size_t bytes, int num_passes) {
    const int claims = int((bytes + kClaimBytes - 1) / kClaimBytes);
    const Memory memory(claims * kClaimBytes);
    parallel_for(pool, claims,
                 [&](int claim, int) { std::memset(memory.data() + claim * kClaimBytes, 1, kClaimBytes); });
    std::atomic<std::uint64_t> sum{0};  // so that the reading cannot be left out
    std::vector<double> speeds;
    for (int pass = 0; pass < num_passes; ++pass) {
        const auto began = std::chrono::steady_clock::now();
        parallel_for(pool, claims, [&](int claim, int) {
            const std::byte* begin = memory.data() + claim * kClaimBytes;
            sum.fetch_add(read_lines(begin, begin + kClaimBytes), std::memory_order_relaxed);
        });
        const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - began;
        speeds.push_back(double(memory.size()) / taken.count());
    }
    return speeds;
}

}  // namespace headrace
