#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "shm/collectives/fingerprint.h"

namespace paceline::shm {

// What a rank has done towards a step of training, in words that ranks exchange with the step.
struct StepSummary {
  std::uint32_t forwards = 0;  // training forwards whose backward is synchronised
  // Those under no_sync; 0 where ranks may run different numbers of them.
  std::uint32_t local_forwards = 0;
  // Of the set of frozen parameters; 0 if there is none.
  std::uint32_t frozen = 0;
  // How often parameters were changed since the ranks last had the same. Other numbers on other
  // ranks are no error, but a reason to compare the parameters.
  std::uint32_t modifications = 0;
  // 1 if the rank has joined: it runs the step for the others' sake, and what it has frozen or
  // changed is of no interest.
  std::uint32_t joined = 0;

  bool operator==(const StepSummary&) const = default;
};
static_assert(sizeof(StepSummary) == 5 * sizeof(std::uint32_t), "it travels as bytes");

// By parameter: 1 if it is frozen.
using FrozenFlags = std::span<const std::uint8_t>;

// The value of StepSummary::frozen. Two sets have the same in one case of 2^32.
std::uint32_t fingerprint(FrozenFlags flags);

// These take the summaries of all ranks, by rank. A disagreement that names no rank is none.
Disagreement compare_forwards(std::span<const StepSummary> ranks, const GlobalRanks& numbers);
bool differ_in_frozen(std::span<const StepSummary> ranks);
bool differ_in_modifications(std::span<const StepSummary> ranks);

// Names the parameters that are frozen on some ranks only. `flags` is by rank; empty for a rank
// that does not count.
Disagreement compare_frozen(std::span<const FrozenFlags> flags,
                            std::span<const std::string> parameters, const GlobalRanks& numbers);

}  // namespace paceline::shm
