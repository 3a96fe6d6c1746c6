#pragma once

#include <span>
#include <string>
#include <vector>

#include "shm/buckets/step_values.h"
#include "shm/collectives/fingerprint.h"

namespace paceline::shm {

// These take the summaries of all ranks, by rank. A Disagreement without ranks means agreement.
Disagreement compare_forwards(std::span<const StepSummary> ranks, const GlobalRanks& global_ranks);
bool differ_in_frozen(std::span<const StepSummary> ranks);
bool differ_in_modifications(std::span<const StepSummary> ranks);

// Names the parameters that are frozen on some ranks only. `flags` is by rank; empty for a rank
// that is not compared.
Disagreement compare_frozen(std::span<const FrozenFlags> flags,
                            std::span<const std::string> parameters,
                            const GlobalRanks& global_ranks);

}  // namespace paceline::shm
