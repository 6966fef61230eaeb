// Zeroed memory straight from the operating system: pages are taken when first touched, huge ones where it can. And how
// much of it the cache before it holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <new>
#include <utility>

#include <sys/mman.h>

namespace headrace {

// Of one of the processor's last caches; more than there can be where the system does not say. (sysconf's figure is of
// all of them together.)
inline std::size_t last_cache_bytes() {
    std::size_t kilobytes = 0;
    std::ifstream("/sys/devices/system/cpu/cpu0/cache/index3/size") >> kilobytes;
    return kilobytes == 0 ? ~std::size_t(0) : kilobytes << 10;
}

class Memory {
public:
    Memory() = default;
    explicit Memory(std::size_t bytes) : bytes_(bytes) {
        if (bytes == 0) return;
        const std::size_t slack = bytes < kHugePage ? 0 : kHugePage;
        map_ = map(bytes + slack);
        map_bytes_ = bytes + slack;
        // A huge page is only given where all of it lies inside the mapping.
        start_ = map_ + (slack == 0 ? 0 : -reinterpret_cast<std::uintptr_t>(map_) % kHugePage);
        madvise(start_, bytes, MADV_HUGEPAGE);  // fewer TLB misses; advice only, so a refusal does no harm
    }
    Memory(Memory&& other) noexcept { swap(other); }
    Memory& operator=(Memory&& other) noexcept {
        swap(other);
        return *this;
    }
    ~Memory() {
        if (map_ != nullptr) unmap(map_, map_bytes_);
    }

    std::byte* data() const { return start_; }
    float* floats() const { return reinterpret_cast<float*>(start_); }
    std::size_t size() const { return bytes_; }
    explicit operator bool() const { return start_ != nullptr; }

private:
    static constexpr std::size_t kHugePage = 2u << 20;

#if defined(__SANITIZE_ADDRESS__)  // it sees the borders of its own allocator's memory alone
    static constexpr std::align_val_t kPage{4096};

    static std::byte* map(std::size_t bytes) { return new (kPage) std::byte[bytes](); }
    static void unmap(std::byte* map, std::size_t) { ::operator delete[](map, kPage); }
#else
    static std::byte* map(std::size_t bytes) {
        void* map = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (map == MAP_FAILED) throw std::bad_alloc();
        return static_cast<std::byte*>(map);
    }
    static void unmap(std::byte* map, std::size_t bytes) { munmap(map, bytes); }
#endif

    void swap(Memory& other) {
        std::swap(map_, other.map_);
        std::swap(map_bytes_, other.map_bytes_);
        std::swap(start_, other.start_);
        std::swap(bytes_, other.bytes_);
    }

    std::byte* map_ = nullptr;
    std::size_t map_bytes_ = 0;
    std::byte* start_ = nullptr;
    std::size_t bytes_ = 0;
};

}  // namespace headrace
