// How fast a pool's threads read memory, the roof of everything that streams weights, and each other's lines.
#pragma once

#include <cstddef>
#include <vector>

#include "threads.h"

namespace headrace {

// Bytes per second of each of `num_passes` passes over `bytes` (rounded up to whole claims) of memory of its own, in
// huge pages where the system has them. Choose `bytes` far above the last cache's size.
std::vector<double> read_bandwidth(ThreadPool& pool, std::size_t bytes, int num_passes);

// Seconds that a cache line takes from one of two threads to the other, one way, in each of `num_passes` passes; passes
// in which no two threads had cores of their own are left out. What every barrier costs, and every line that one thread
// writes and another reads: several times as much where the two cores share no cache.
std::vector<double> line_transfer(ThreadPool& pool, int num_passes);

}  // namespace headrace
