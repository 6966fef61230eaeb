// What the thread pool promises, whatever the instruction set: under TSan these find what Python's tests cannot.
#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>

#include "../digest.h"
#include "../threads.h"
#include "cases.h"
#include "inputs.h"

namespace headrace::conformance {
namespace {

// Sizes around a step of all lanes, and of several claims.
constexpr std::size_t kDigestBytes[] = {0, 1, 63, 64, 65, (3 << 20) + 5};
constexpr int kThreads[] = {1, 2, 3};
constexpr int kRuns = 200, kTiles = 64;

Output digests(const Kernels&) {
    Output output;
    for (const std::size_t bytes : kDigestBytes) {
        Array<std::byte> data(bytes);
        Random random(bytes);
        for (std::byte& it : data) it = std::byte(random.bits());
        std::uint64_t alone = 0;
        for (const int num_threads : kThreads) {
            ThreadPool pool(num_threads);
            const std::uint64_t now = digest(pool, data.data(), data.size());
            if (num_threads == 1) alone = now;
            if (now != alone) throw std::runtime_error("depends on the number of threads");
        }
        output.add(std::as_bytes(std::span(&alone, 1)));
    }
    return output;
}

// How often each tile was computed, while another thread asks for a core and gives it back, over and over.
Output runs_beside_a_borrower(const Kernels&) {
    ThreadPool pool(3);
    std::atomic<bool> is_over{false};
    std::thread borrower([&] {
        while (!is_over) {
            pool.lend_core();
            std::this_thread::yield();
            pool.take_core_back();
        }
    });
    Array<std::int32_t> counts(kTiles);
    std::fill(counts.begin(), counts.end(), 0);
    for (int run = 0; run < kRuns; ++run) parallel_for(pool, kTiles, [&](int tile, int) { ++counts[tile]; });
    is_over = true;
    borrower.join();
    Output output;
    output.add(counts.all());
    return output;
}

}  // namespace

void add_thread_cases(std::vector<Case>& cases) {
    cases.push_back({"threads/digest", digests});
    cases.push_back({"threads/lent_core", runs_beside_a_borrower});
}

}  // namespace headrace::conformance
