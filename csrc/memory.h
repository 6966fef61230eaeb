// Zeroed memory straight from the operating system: pages are taken when first touched, huge ones where it can.
#pragma once

#include <cstddef>
#include <new>
#include <utility>

#include <sys/mman.h>

namespace headrace {

class Memory {
public:
    Memory() = default;
    explicit Memory(std::size_t bytes) : bytes_(bytes) {
        if (bytes == 0) return;
        void* start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (start == MAP_FAILED) throw std::bad_alloc();
        start_ = static_cast<std::byte*>(start);
        madvise(start, bytes, MADV_HUGEPAGE);  // fewer TLB misses; advice only, so a refusal does no harm
    }
    Memory(Memory&& other) noexcept
        : start_(std::exchange(other.start_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    Memory& operator=(Memory&& other) noexcept {
        std::swap(start_, other.start_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~Memory() {
        if (start_ != nullptr) munmap(start_, bytes_);
    }

    std::byte* data() const { return start_; }
    float* floats() const { return reinterpret_cast<float*>(start_); }
    std::size_t size() const { return bytes_; }
    explicit operator bool() const { return start_ != nullptr; }

private:
    std::byte* start_ = nullptr;
    std::size_t bytes_ = 0;
};

}  // namespace headrace
