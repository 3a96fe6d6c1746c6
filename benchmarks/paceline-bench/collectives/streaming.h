#pragma once

#include <cstdint>

#include "measure/rounds.h"

namespace paceline::bench {

// A loop that adds up a slice of `ranks` vectors of `bytes` bytes of float32 and writes the sum
// into all of them: what an all_reduce in shared memory has to read and write, without waiting for
// another rank.
Contender streaming(int ranks, std::int64_t bytes);

}  // namespace paceline::bench
