#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "measure/result.h"

namespace paceline::bench {

// One of the implementations that are measured against each other.
struct Contender {
  std::string implementation;
  std::string variant;
  // Before the clock starts; may be empty. Its end need not be simultaneous on all ranks.
  std::function<void()> prepare;
  // What is timed: `calls` calls, so many that the clock's own cost does not count.
  std::function<void()> run;
  int calls = 1;
  // Instead of the above, for an implementation in processes of its own: measures that many calls.
  // Rank 0's answer is for all ranks; the others give zeros.
  std::function<Sample(int calls)> elsewhere = {};
};

struct RoundPlan {
  int rounds;
  // A contender repeats its run in each round until about this much time has passed. 0: it runs
  // once, and not before that to fill the caches: enough if a run takes far longer than these.
  std::chrono::microseconds length;
};

// Lets the contenders take turns for all rounds; the order changes from round to round, so that
// none always follows the same other. Collective over the world; complete on rank 0, which gets
// from each round the time of the slowest rank and the CPU time of all.
std::vector<Series> measure(const std::vector<Contender>& contenders, const RoundPlan& plan);

}  // namespace paceline::bench
