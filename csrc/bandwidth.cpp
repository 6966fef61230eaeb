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

constexpr int kTransfers = 2000;  // of a pass: 50 to 500 us
constexpr std::chrono::milliseconds kPatience{20};

// Two threads hand one line to and fro. Each needs a core of its own: where they share one, neither waits long.
class Rally {
public:
    // Seconds that it took, of side 1; 0 if it did not come to its end.
    double play(int side) {
        num_there_.fetch_add(1);
        if (!wait_until([&] { return num_there_.load() == 2; })) return 0.0;  // one thread may take both sides in turn
        const auto began = Clock::now();
        for (int i = side; i < kTransfers; i += 2) {
            if (!wait_until([&] { return next_.load(std::memory_order_acquire) == i; })) return 0.0;
            next_.store(i + 1, std::memory_order_release);
        }
        return side == 1 ? std::chrono::duration<double>(Clock::now() - began).count() : 0.0;
    }

private:
    using Clock = std::chrono::steady_clock;
    static constexpr int kSpins = 1000;  // between looks at the clock

    template <class Condition>
    bool wait_until(const Condition& is_met) {
        for (int spins = 1; !is_met(); ++spins) {
            if (spins % kSpins == 0 && Clock::now() > end_) return false;
        }
        return true;
    }

    const Clock::time_point end_ = Clock::now() + kPatience;
    alignas(kLine) std::atomic<int> next_{0};
    alignas(kLine) std::atomic<int> num_there_{0};
};

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

std::vector<double> line_transfer(ThreadPool& pool, int num_passes) {
    std::vector<double> seconds;
    if (pool.num_threads() < 2) return seconds;
    for (int pass = 0; pass < num_passes; ++pass) {
        Rally rally;
        std::atomic<double> taken{0.0};
        parallel_for(pool, 2, [&](int side, int) {
            const double its = rally.play(side);
            if (its > 0.0) taken.store(its);
        });
        if (taken.load() > 0.0) seconds.push_back(taken.load() / kTransfers);
    }
    return seconds;
}

}  // namespace headrace
