// A checksum of large memory, as fast as threads read it: whether a file of packed weights is still what was written.
#pragma once

#include <cstddef>
#include <cstdint>

#include "threads.h"

namespace headrace {

// Of `bytes` at `data`, the same for any number of threads. No two memories that differ in one word of 8 bytes have the
// same one; it is no protection against intent.
std::uint64_t digest(ThreadPool& pool, const std::byte* data, std::size_t bytes);

}  // namespace headrace
