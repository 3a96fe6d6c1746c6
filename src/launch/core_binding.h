#pragma once

#include <optional>
#include <vector>

#include "launch/held_cpus.h"

namespace paceline::launch {

// CPUs for each rank of a job, which no other job gets while this lives.
struct CoreBinding {
  std::vector<std::vector<int>> cpus;  // of each rank, the same number for each
  HeldCpus held;
};

// Chooses among those of `available` that no other job holds. nullopt if they are fewer than
// `ranks`.
std::optional<CoreBinding> bind_to_cores(const std::vector<int>& available, int ranks);

}  // namespace paceline::launch
