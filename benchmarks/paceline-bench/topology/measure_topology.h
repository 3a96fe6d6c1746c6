#pragma once

#include "measure/result.h"
#include "measure/rounds.h"
#include "options.h"

namespace paceline::bench {

// The algorithms that the options name, on a float32 tensor of their size: times, traffic, and what
// the links of the nodes carried, if each rank is on a node of its own. Messages between nodes are
// Gloo's, whose receiver can ask for the data before it is sent: in the backend paceline it
// first gets a header, and then its request often waits behind its own data. Collective over the
// world; complete on rank 0.
Result measure_topology(const Options& options, const RoundPlan& plan);

}  // namespace paceline::bench
