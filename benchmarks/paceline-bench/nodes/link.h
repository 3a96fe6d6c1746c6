#pragma once

#include <cstdint>

#include "measure/rounds.h"

namespace paceline::bench {

// What an all_reduce of `bytes` bytes has to move between nodes, by TCP alone: the first rank of
// each node sends 2 (N - 1) / N of them to that of the next node, while it receives as many.
// Collective over the world, whose ranks are nodes * n.
Contender link(int nodes, std::int64_t bytes);

}  // namespace paceline::bench
