#pragma once

#include <paceline/distributed.h>

#include <cstdint>
#include <optional>
#include <string>

#include "result.h"
#include "rounds.h"

namespace paceline::bench {

// all_reduce of `bytes` bytes of float32 with SUM at the level of c10d::Backend: the world's, for
// memory of its own ("shared") and for any other ("ordinary"), and Gloo's if there is one; and
// MPI_Allreduce if there is an `mpirun`. Collective over the world; complete on rank 0.
Result measure_all_reduce(const std::optional<ProcessGroup>& gloo, const std::string& mpirun,
                          std::int64_t bytes, const RoundPlan& plan);

}  // namespace paceline::bench
