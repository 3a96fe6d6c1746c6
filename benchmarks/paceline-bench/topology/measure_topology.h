#pragma once

#include "measure/result.h"
#include "measure/rounds.h"
#include "options.h"

namespace paceline::bench {

// The algorithms that the options name, on a float32 tensor of their size: times, traffic, and what
// the links of the nodes carried, if each rank is on a node of its own. Messages between nodes are
// Gloo's: those of the backend paceline ask for the data once more, to check its size. Collective
// over the world; complete on rank 0.
Result measure_topology(const Options& options, const RoundPlan& plan);

}  // namespace paceline::bench
