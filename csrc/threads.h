// The thread pool: a run is a series of phases, a phase a number of independent tiles.
//
// Tiles are claimed one at a time from one atomic word, so which thread computes what is left to chance; results must
// not depend on it. A phase ends when its last tile is done, not when every thread has arrived: a thread that the
// kernel took off its core between tiles holds up nobody. Knows nothing of models.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <unistd.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace headrace {

// Sets denormals to zero, in and out, for one thread and restores what was there. On every computing thread alike: a
// tile's bits must not depend on who computes it, and AVX-512's bf16 products flush them whatever the mode says.
class FlushDenormals {
public:
    FlushDenormals() : saved_(get()) { set(kMode); }
    ~FlushDenormals() { set(saved_); }
    FlushDenormals(const FlushDenormals&) = delete;
    FlushDenormals& operator=(const FlushDenormals&) = delete;

private:
#if defined(__SSE__)
    using Mode = unsigned;
    static constexpr Mode kMode = 0x9FC0;  // round to nearest, exceptions masked, flush to zero, denormals are zero
    static Mode get() { return _mm_getcsr(); }
    static void set(Mode mode) { _mm_setcsr(mode); }
#elif defined(__aarch64__)
    using Mode = std::uint64_t;
    static constexpr Mode kMode = Mode(1) << 24;  // FPCR.FZ
    static Mode get() {
        Mode mode;
        asm volatile("mrs %0, fpcr" : "=r"(mode));
        return mode;
    }
    static void set(Mode mode) { asm volatile("msr fpcr, %0" ::"r"(mode)); }
#else
#error "say here how this processor flushes denormals"
#endif
    Mode saved_;
};

// What a run does. `open` is called by one thread before each phase, with all earlier tiles done and visible: it says
// how many tiles the next phase has, or kEnd. `tile` is then called once for each, on any thread.
struct Job {
    static constexpr int kEnd = -1;

    void* self;
    int (*open)(void* self);
    void (*tile)(void* self, int tile, int thread);
};

class ThreadPool {
public:
    static constexpr int kMaxThreads = 1024;
    static constexpr int kMaxTiles = (1 << 20) - 1 - kMaxThreads;  // of one phase; see Ticket

    // `num_threads` compute, the one that calls run() among them. Workers inherit the caller's affinity. Throws
    // std::runtime_error, saying how many there were, if the system does not give that many.
    explicit ThreadPool(int num_threads) : num_threads_(num_threads), owner_(getpid()) {
        workers_ = std::make_unique<std::vector<std::thread>>();
        try {
            workers_->reserve(num_threads - 1);
            for (int thread = 1; thread < num_threads; ++thread) {
                workers_->emplace_back([this, thread] { serve(thread); });
            }
        } catch (const std::exception& error) {  // std::system_error, or no memory for one more
            const std::string reason = error.what();
            const std::size_t num_started = 1 + workers_->size();
            close();
            throw std::runtime_error("the system gave " + std::to_string(num_started) + " of " +
                                     std::to_string(num_threads) + " threads: " + reason);
        }
    }
    ~ThreadPool() { close(); }
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int num_threads() const { return num_threads_; }
    // False once closed, and in a process forked from the one that made it: the threads are not there.
    bool is_usable() const { return workers_ != nullptr && getpid() == owner_; }

    void run(const Job& job) {
        std::lock_guard only_run(run_mutex_);
        FlushDenormals flush;
        job_ = job;
        open_next(0);
        while (work(0)) {
        }
    }

    void close() {
        if (workers_ == nullptr) return;
        if (getpid() != owner_) {
            (void)workers_.release();  // a forked child has the handles without the threads: nothing to join
            return;
        }
        std::lock_guard only_run(run_mutex_);
        is_closing_ = true;
        publish(Ticket::pack(next_phase(), 0, true));
        for (auto& worker : *workers_) worker.join();
        workers_.reset();
    }

private:
    // phase (23 bits, wraps) | idle (1) | tiles of the phase (20) | next tile to claim (20). One word, so that a claim
    // that comes too late says so by itself and touches nothing that may be gone. `next` exceeds the count by at most
    // one claim per thread, hence kMaxTiles.
    struct Ticket {
        static constexpr int kCountBits = 20;
        std::uint64_t word;

        static std::uint64_t pack(std::uint64_t phase, int count, bool is_idle) {
            return (phase << 41) | (std::uint64_t(is_idle) << 40) | (std::uint64_t(count) << kCountBits);
        }
        std::uint64_t phase() const { return word >> 41; }
        bool is_idle() const { return (word >> 40) & 1; }
        int count() const { return int((word >> kCountBits) & ((1 << kCountBits) - 1)); }
        int next() const { return int(word & ((1 << kCountBits) - 1)); }
    };
    // How a thread waits: at first it spins (phases follow each other within microseconds); then it offers its core to
    // whoever wants it, so that between the steps of a running request it is there when the next begins (to be woken
    // costs 50 us and more on a virtual machine, often a step's whole gain); then it sleeps: an idle server uses no
    // CPU.
    static constexpr std::chrono::microseconds kSpin{30};
    static constexpr std::chrono::microseconds kStayAwake{1000};

    std::uint64_t next_phase() const { return Ticket{ticket_.load(std::memory_order_relaxed)}.phase() + 1; }

    // Opens the next phase that has tiles, or goes idle at the end of the run. One thread at a time. A phase of a
    // single tile (the row operations of a decode) is computed on the spot: no other thread need hear of it.
    void open_next(int thread) {
        int count;
        while ((count = job_.open(job_.self)) == 0 || count == 1) {
            if (count == 1) job_.tile(job_.self, 0, thread);
        }
        done_.store(0, std::memory_order_relaxed);
        publish(count == Job::kEnd ? Ticket::pack(next_phase(), 0, true) : Ticket::pack(next_phase(), count, false));
    }

    void publish(std::uint64_t word) {
        ticket_.store(word, std::memory_order_seq_cst);
        if (num_asleep_.load(std::memory_order_seq_cst) == 0) return;
        std::lock_guard lock(sleep_mutex_);
        wake_.notify_all();
    }

    // Computes what can be claimed of the present phase and waits for the next; false once there is no job.
    bool work(int thread) {
        for (;;) {
            const Ticket ticket{ticket_.fetch_add(1, std::memory_order_acq_rel)};
            if (ticket.is_idle()) return false;
            if (ticket.next() >= ticket.count()) {
                wait_past(ticket.phase());
                return true;
            }
            job_.tile(job_.self, ticket.next(), thread);
            if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == ticket.count()) open_next(thread);
        }
    }

    void serve(int thread) {
        FlushDenormals flush;
        for (;;) {
            while (work(thread)) {
            }
            if (is_closing_) return;
            const Ticket ticket{ticket_.load(std::memory_order_acquire)};
            if (ticket.is_idle()) wait_past(ticket.phase());
        }
    }

    void wait_past(std::uint64_t phase) {
        const auto has_moved = [&] { return Ticket{ticket_.load(std::memory_order_seq_cst)}.phase() != phase; };
        const auto began = std::chrono::steady_clock::now();
        for (auto waited = began - began; waited < kStayAwake; waited = std::chrono::steady_clock::now() - began) {
            for (int i = 0; i < 64; ++i) {
                if (has_moved()) return;
                relax();
            }
            if (waited >= kSpin) std::this_thread::yield();
        }
        std::unique_lock lock(sleep_mutex_);
        num_asleep_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, has_moved);
        num_asleep_.fetch_sub(1, std::memory_order_relaxed);
    }

    static void relax() {
#if defined(__SSE__)
        _mm_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    const int num_threads_;
    const pid_t owner_;
    Job job_{};
    std::unique_ptr<std::vector<std::thread>> workers_;
    std::atomic<bool> is_closing_{false};
    std::mutex run_mutex_;
    std::mutex sleep_mutex_;
    std::condition_variable wake_;
    std::atomic<int> num_asleep_{0};
    alignas(64) std::atomic<std::uint64_t> ticket_{Ticket::pack(0, 0, true)};
    alignas(64) std::atomic<int> done_{0};
};

// Calls body(tile, thread) for each of `count` tiles.
template <class Body>
void parallel_for(ThreadPool& pool, int count, const Body& body) {
    struct Loop {
        const Body* body;
        int count;
        int first = 0;  // tile of the present phase's tile 0
        int next = 0;
    } loop{&body, count};
    pool.run({&loop,
              [](void* self) {
                  Loop& it = *static_cast<Loop*>(self);
                  it.first = it.next;
                  it.next = std::min(it.count, it.first + ThreadPool::kMaxTiles);
                  return it.next == it.first ? Job::kEnd : it.next - it.first;
              },
              [](void* self, int tile, int thread) {
                  const Loop& it = *static_cast<const Loop*>(self);
                  (*it.body)(it.first + tile, thread);
              }});
}

}  // namespace headrace
