#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "report/analysis/analysis.h"
#include "report/analysis/diagnosis.h"

namespace paceline::report {

// Fewer steps say little about a run.
inline constexpr std::size_t kFewestSteps = 8;
// A rank that waits for a core for this share of the time is slower by as much in all it does.
inline constexpr double kNotableQueue = 0.10;

// The rank that others waited for most, and how its mean times differ from the median of the
// others' means, in microseconds a step. A median over steps would hide work in every fourth step.
struct LateRank {
  int rank = -1;
  double share = 0;                  // of the stall
  const RankTimes* times = nullptr;  // null if its timeline is missing
  double usual_computing = 0;        // of the others
  double more_computing = 0;
  double later_start = 0;
  bool starts_late = false;  // its time between steps costs more than its computing
};

// Several ranks that compute longer than the others on average; none if that is not so.
struct SlowRanks {
  std::vector<int> ranks;
  double computing = 0;         // of these, microseconds a step
  double usual_computing = 0;   // of the others
  std::vector<double> parts{};  // by index in Analysis::ranks: 1, or what makes it usual
};

// Of its gradients. Empty if the size of a bucket is not known.
std::optional<std::uint64_t> bytes_of_step(const Analysis& analysis);

// What their reductions should take, in microseconds a step: by what was measured before the first
// step, or, if nothing was, what even a slow network needs.
struct ExpectedCommunication {
  double messages;  // for the number of buckets
  double transfer;  // for their bytes
  double sum() const { return messages + transfer; }
};
std::optional<ExpectedCommunication> expected_communication(const Analysis& analysis);

// `finding` in words: the sentence, reasons and remedies.
Diagnosis explain(Finding finding, const Analysis& analysis, const LateRank& late,
                  const SlowRanks& slow);

}  // namespace paceline::report
