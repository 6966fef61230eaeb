#include "digest.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

namespace headrace {
namespace {

constexpr std::size_t kClaimBytes = 1 << 20;        // long beside what claiming costs; part of the digest's definition
constexpr std::size_t kLanes = 8;                   // chains of multiplications side by side: one would wait for itself
constexpr std::uint64_t kOdd = 0x9E3779B97F4A7C15;  // multiplying by it loses nothing (the golden ratio of 2^64)

// Each step loses nothing. Products carry differences upwards alone: rotated, those of the top bits come back.
std::uint64_t take(std::uint64_t so_far, std::uint64_t word) { return std::rotl((so_far ^ word) * kOdd, 29); }

std::uint64_t digest_claim(const std::byte* data, std::size_t bytes) {
    std::uint64_t lanes[kLanes];
    for (std::size_t i = 0; i < kLanes; ++i) lanes[i] = i + 1;
    for (std::size_t at = 0; at < bytes; at += sizeof lanes) {
        std::uint64_t words[kLanes] = {};
        std::memcpy(words, data + at, std::min(sizeof words, bytes - at));
        for (std::size_t i = 0; i < kLanes; ++i) lanes[i] = take(lanes[i], words[i]);
    }
    std::uint64_t all = bytes;
    for (const std::uint64_t lane : lanes) all = take(all, lane);
    return all;
}

}  // namespace

std::uint64_t digest(ThreadPool& pool, const std::byte* data, std::size_t bytes) {
    std::vector<std::uint64_t> claims((bytes + kClaimBytes - 1) / kClaimBytes);
    parallel_for(pool, int(claims.size()), [&](int claim, int) {
        const std::size_t at = claim * kClaimBytes;
        claims[claim] = digest_claim(data + at, std::min(kClaimBytes, bytes - at));
    });
    std::uint64_t all = bytes;
    for (const std::uint64_t claim : claims) all = take(all, claim);
    return all;
}

}  // namespace headrace
