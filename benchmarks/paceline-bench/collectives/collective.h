#pragma once

#include <cstdint>
#include <string>

#include "measure/other_groups.h"
#include "measure/result.h"
#include "measure/rounds.h"
#include "options.h"

namespace paceline::bench {

// One of kCollectives on float32 by the public functions: over the world's backend, for registered
// and unregistered memory, over the others, and by the MPI libraries that are not absent.
// Of a rank's tensors the largest, which may be made up of a part for each rank, has
// `bytes` bytes. all_reduce is compared with `streaming`, too: what its reads and writes cost each
// rank in memory of its own; calls that only move data with `single_copy`, where the system allows
// it. On several nodes all_reduce is compared with `link` instead. Collective over the world;
// complete on rank 0.
Result measure_collective(const std::string& name, const OtherGroups& others,
                          const Options& options, std::int64_t bytes, const RoundPlan& plan);

}  // namespace paceline::bench
