#pragma once

#include <optional>

#include "launch/job.h"

namespace paceline::launch {

// Sets OMP_NUM_THREADS for the job's processes to each one's share of `cores`, and of its own CPUs,
// unless spec.environment has it. Returns what they get; nullopt, and sets nothing, if this
// process's own environment has it.
std::optional<int> choose_omp_threads(JobSpec& spec, int cores);

}  // namespace paceline::launch
