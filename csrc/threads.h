// The thread pool: a run is a series of phases, a phase a number of independent tiles.
//
// Each thread has a share of a phase's tiles, consecutive ones, which it takes from the front: what it reads is one
// stream, and the same in each run. Who is done takes what is left of others' shares, from the back; so which thread
// computes what is left to chance, and results must not depend on it. A phase ends when its last tile is done, not when
// every thread has arrived: a thread that the kernel took off its core between tiles holds up nobody. Knows nothing of
// models.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
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
// how many tiles the next phase has, or kEnd. `tile` is then called once for each, on any thread. `ahead`, which may be
// null, is called after `open`: what a thread that is done with the phase may fetch while it waits for the others.
// `meanwhile`, which may be null, is called once by the thread that runs the job, while the others compute; it must not
// use the pool. Nothing of all this may throw.
struct Job {
    static constexpr int kEnd = -1;

    void* self;
    int (*open)(void* self);
    void (*tile)(void* self, int tile, int thread);
    std::span<const std::byte> (*ahead)(void* self, int thread) = nullptr;
    void (*meanwhile)(void* self) = nullptr;
};

// The first of `count` tiles that are `thread`'s own.
inline int share_begin(int count, int thread, int num_threads) {
    return int(std::int64_t(count) * thread / num_threads);
}

class ThreadPool {
public:
    static constexpr int kMaxThreads = 1024;
    static constexpr int kMaxTiles = (1 << 20) - 1;  // of one phase; see Tiles

    // `num_threads` compute, the one that calls run() among them. Workers inherit the caller's affinity. Throws
    // std::runtime_error, saying how many there were, if the system does not give that many.
    explicit ThreadPool(int num_threads) : num_threads_(num_threads), owner_(getpid()), shares_(num_threads) {
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
        job_ = job;
        {
            FlushDenormals flush;
            open_next(0);
        }
        if (job.meanwhile != nullptr) job.meanwhile(job.self);  // in the caller's own mode
        FlushDenormals flush;
        while (take_part(0)) {
        }
    }

    // Offers the core of one worker to other threads of this process and to its clients: from its next phase on that
    // worker takes no tiles, until take_core_back(), for kLendingTime at most. Where every core computes, such threads
    // would run all the same, but on the core of a thread that has begun a tile, for whose end the others wait. From
    // any thread.
    void lend_core() { is_core_lent_.store(true, std::memory_order_relaxed); }
    void take_core_back() { is_core_lent_.store(false, std::memory_order_relaxed); }

    void close() {
        if (workers_ == nullptr) return;
        if (getpid() != owner_) {
            // A forked child has the handles without the threads: nothing to join, and who destroyed what they sleep on
            // would wait for them to leave it.
            (void)workers_.release();
            (void)wake_.release();
            return;
        }
        std::lock_guard only_run(run_mutex_);
        is_closing_ = true;
        publish(Phase::idle(phase_now().number() + 1));
        for (auto& worker : *workers_) worker.join();
        workers_.reset();
    }

private:
    // The present phase; idle: between runs.
    struct Phase {
        std::uint64_t word;

        static Phase of(std::uint64_t number) { return {number << 1}; }
        static Phase idle(std::uint64_t number) { return {number << 1 | 1}; }
        std::uint64_t number() const { return word >> 1; }
        bool is_idle() const { return word & 1; }
    };
    // A thread's tiles of a phase that nobody has taken: phase (24 bits, wraps) | begin (20) | end (20). One word, so
    // that who comes too late takes nothing and touches nothing that may be gone.
    struct Tiles {
        static constexpr int kBits = 20;
        static constexpr std::uint64_t kMask = (std::uint64_t(1) << kBits) - 1;
        std::uint64_t word;

        static Tiles of(Phase phase, int begin, int end) {
            return {phase.number() << 2 * kBits | std::uint64_t(begin) << kBits | std::uint64_t(end)};
        }
        bool is_of(Phase phase) const { return of(phase, begin(), end()).word == word; }
        int begin() const { return int(word >> kBits & kMask); }
        int end() const { return int(word & kMask); }
    };
    struct alignas(64) Share {
        std::atomic<std::uint64_t> tiles{0};
        std::atomic<const std::byte*> ahead{nullptr};
        std::atomic<std::size_t> ahead_bytes{0};
    };
    // How a thread waits: at first it spins (phases follow each other within microseconds); then it offers its core to
    // whoever wants it, so that between the steps of a running request it is there when the next begins (to be woken
    // costs 50 us and more on a virtual machine, often a step's whole gain); then it sleeps: an idle server uses no
    // CPU.
    static constexpr std::chrono::microseconds kSpin{30};
    static constexpr std::chrono::microseconds kStayAwake{1000};
    static constexpr std::chrono::microseconds kLendingTime{5000};

    static constexpr int kNone = -1;
    static constexpr std::size_t kLine = 64;

    Phase phase_now() const { return {phase_.load(std::memory_order_seq_cst)}; }

    // Opens the next phase that has tiles, or goes idle at the end of the run. One thread at a time. A phase of a
    // single tile (the row operations of a decode) is computed on the spot: no other thread need hear of it.
    void open_next(int thread) {
        int count;
        while ((count = job_.open(job_.self)) == 0 || count == 1) {
            if (count == 1) job_.tile(job_.self, 0, thread);
        }
        const std::uint64_t number = phase_now().number() + 1;
        if (count == Job::kEnd) return publish(Phase::idle(number));
        num_left_.store(count, std::memory_order_relaxed);
        for (int i = 0; i < num_threads_; ++i) share_out(Phase::of(number), count, i);
        publish(Phase::of(number));
    }

    void share_out(Phase phase, int count, int thread) {
        Share& share = shares_[thread];
        if (job_.ahead != nullptr) {
            const std::span<const std::byte> ahead = job_.ahead(job_.self, thread);
            share.ahead.store(ahead.data(), std::memory_order_relaxed);
            share.ahead_bytes.store(ahead.size(), std::memory_order_relaxed);
        }
        const int begin = share_begin(count, thread, num_threads_), end = share_begin(count, thread + 1, num_threads_);
        share.tiles.store(Tiles::of(phase, begin, end).word, std::memory_order_release);
    }

    void publish(Phase phase) {
        phase_.store(phase.word, std::memory_order_seq_cst);
        if (num_asleep_.load(std::memory_order_seq_cst) == 0) return;
        std::lock_guard lock(sleep_mutex_);
        wake_->notify_all();
    }

    // Computes what it can get of the present phase and waits for the next; false once there is no job.
    bool take_part(int thread) {
        const Phase phase = phase_now();
        if (phase.is_idle()) return false;
        int num_done = 0;
        for (int i = 0; i < num_threads_; ++i) {
            Share& share = shares_[(thread + i) % num_threads_];
            for (int tile; (tile = take(share, phase, i == 0)) != kNone; ++num_done) {
                job_.tile(job_.self, tile, thread);
            }
        }
        if (num_done > 0 && num_left_.fetch_sub(num_done, std::memory_order_acq_rel) == num_done) {
            open_next(thread);
        } else {
            wait_past(phase, thread);
        }
        return true;
    }

    static int take(Share& share, Phase phase, bool is_own) {
        Tiles now{share.tiles.load(std::memory_order_acquire)};
        while (now.is_of(phase) && now.begin() < now.end()) {
            const Tiles left =
                is_own ? Tiles::of(phase, now.begin() + 1, now.end()) : Tiles::of(phase, now.begin(), now.end() - 1);
            if (share.tiles.compare_exchange_weak(now.word, left.word, std::memory_order_acq_rel)) {
                return is_own ? now.begin() : left.end();
            }
        }
        return kNone;
    }

    void serve(int thread) {
        FlushDenormals flush;
        while (!is_closing_) {
            if (thread == num_threads_ - 1) stand_aside();
            if (!take_part(thread)) {
                const Phase phase = phase_now();
                if (phase.is_idle() && !is_closing_) wait_past(phase, thread);
            }
        }
    }

    // While its core is lent. It stays awake: a thread that sleeps comes back 50 us and more too late.
    void stand_aside() {
        const auto is_lent = [&] { return is_core_lent_.load(std::memory_order_relaxed) && !is_closing_; };
        if (!is_lent()) return;
        const auto end = std::chrono::steady_clock::now() + kLendingTime;
        while (is_lent() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
        is_core_lent_.store(false, std::memory_order_relaxed);
    }

    void wait_past(Phase phase, int thread) {
        const auto has_moved = [&] { return phase_now().word != phase.word; };
        const Share& share = shares_[thread];
        const std::byte* ahead = share.ahead.load(std::memory_order_relaxed);
        const std::byte* ahead_end = ahead + share.ahead_bytes.load(std::memory_order_relaxed);
        const auto began = std::chrono::steady_clock::now();
        for (auto waited = began - began; waited < kStayAwake; waited = std::chrono::steady_clock::now() - began) {
            for (int i = 0; i < 64; ++i) {
                if (has_moved()) return;
                if (ahead < ahead_end) {
                    for (int line = 0; line < 4; ++line) __builtin_prefetch(ahead + line * kLine, 0, 2);
                    ahead += 4 * kLine;
                } else {
                    relax();
                }
            }
            if (waited >= kSpin) std::this_thread::yield();
        }
        std::unique_lock lock(sleep_mutex_);
        num_asleep_.fetch_add(1, std::memory_order_seq_cst);
        wake_->wait(lock, has_moved);
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
    std::vector<Share> shares_;
    std::unique_ptr<std::vector<std::thread>> workers_;
    std::atomic<bool> is_closing_{false};
    std::atomic<bool> is_core_lent_{false};
    std::mutex run_mutex_;
    std::mutex sleep_mutex_;
    std::unique_ptr<std::condition_variable> wake_ = std::make_unique<std::condition_variable>();
    std::atomic<int> num_asleep_{0};
    alignas(64) std::atomic<std::uint64_t> phase_{Phase::idle(0).word};
    alignas(64) std::atomic<int> num_left_{0};  // tiles of the present phase that are not done
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
