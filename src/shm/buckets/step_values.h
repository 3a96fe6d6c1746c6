#pragma once

#include <chrono>
#include <cstdint>
#include <span>

// The values that a training step begins with and leaves behind, for interfaces that need nothing
// else of bucket reducers.
namespace paceline::shm {

// What a rank has done for a training step; ranks exchange it with the step.
struct StepSummary {
  std::uint32_t forwards = 0;  // training forwards whose backward is synchronised
  // Under no_sync, since the last synchronised step; 0 where ranks may run different numbers.
  std::uint32_t local_backwards = 0;
  // Fingerprint of the set of frozen parameters; 0 if the set is empty.
  std::uint32_t frozen = 0;
  // How often parameters were changed since the ranks last had the same. Different numbers are no
  // error; ranks then compare the parameters.
  std::uint32_t modifications = 0;
  // 1 if the rank has joined: it only matches the others' collectives. Its local_backwards, frozen
  // and modifications are ignored.
  std::uint32_t joined = 0;

  bool operator==(const StepSummary&) const = default;
};
static_assert(sizeof(StepSummary) == 5 * sizeof(std::uint32_t), "it is exchanged as bytes");

// What a rank reports of a step to the ranks of other nodes.
struct RankReport {
  StepSummary summary;
  std::uint32_t finished = 0;  // the last step it finished
  double weight = 1;
  std::uint64_t buckets_fingerprint = 0;  // also covers the number of its parameters
};
static_assert(sizeof(RankReport) == 40, "it is exchanged as bytes");

// By parameter: 1 if it is frozen.
using FrozenFlags = std::span<const std::uint8_t>;

// The value of StepSummary::frozen. Two different sets collide with a probability of 2^-32.
std::uint32_t fingerprint(FrozenFlags flags);

// An interval in which the end of a step was blocked.
struct StepWait {
  int bucket;  // -1: of several
  int rank;    // the global rank that it waited for; -1: several, or other nodes
  std::chrono::steady_clock::time_point begin;
  std::chrono::steady_clock::time_point end;
};

}  // namespace paceline::shm
