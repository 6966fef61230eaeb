// How fast a pool's threads read memory: the roof of everything that streams weights.
#pragma once

#include <cstddef>
#include <vector>

#include "threads.h"

namespace headrace {

// Bytes per second of each of `num_passes` passes over `bytes` (rounded up to whole claims) of memory of its own, in
// huge pages where the system has them. Choose `bytes` far above the last cache's size.
std::vector<double> read_bandwidth(ThreadPool& pool, std::size_t bytes, int num_passes);

}  // namespace headrace
