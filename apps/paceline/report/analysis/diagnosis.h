#pragma once

#include <string>
#include <vector>

#include "report/analysis/analysis.h"

namespace paceline::report {

// The bottleneck of a run.
enum class Finding {
  too_few_steps,
  all_well,
  straggler,       // one rank computes longer, and others wait for it
  late_starter,    // one rank starts its steps later
  too_many_ranks,  // they wait for each other because they share cores
  shared_cores,    // with other work, or with more threads of their own than there are cores
  uneven_load,     // which rank is late changes from step to step
  communication,   // ranks wait though all have published
  short_steps,     // the cost of synchronising at all
  between_steps,   // time outside of steps
  pauses,          // long breaks, not in every step
};

struct Diagnosis {
  Finding finding = Finding::all_well;
  int rank = -1;    // of straggler and late_starter
  int bucket = -1;  // waited for longest; -1 is none
  std::string sentence;
  std::vector<std::string> why;
  std::vector<std::string> remedies;
};

Diagnosis diagnose(const Analysis& analysis);

}  // namespace paceline::report
