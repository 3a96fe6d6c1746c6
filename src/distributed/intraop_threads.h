#pragma once

#include "base/environment.h"
#include "distributed/topology.h"

namespace paceline::distributed {

// If another launcher started the ranks, and the user has not set OMP_NUM_THREADS or
// MKL_NUM_THREADS: gives this rank its share of the cores of its node as LibTorch's threads, if
// that is fewer than it has. `paceline run` and torchrun do the same before a process starts.
// Threads that outnumber the cores wait for each other in each operator.
void limit_intraop_threads(const base::Environment& environment, const Topology& topology,
                           int rank);

}  // namespace paceline::distributed
