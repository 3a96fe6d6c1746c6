#pragma once

#include <string>
#include <vector>

#include "report/analysis/analysis.h"

namespace paceline::report {

// What holds a run back.
enum class Finding {
  too_few_steps,
  all_well,
  straggler,       // one rank computes longer, and others wait for it
  late_starter,    // one rank begins its steps later
  too_many_ranks,  // they wait for each other because they share cores
  shared_cores,    // with other work, or with more threads of their own than there are cores
  uneven_load,     // which rank is late changes from step to step
  communication,   // ranks wait though all have published
  short_steps,     // what it costs to meet at all
  between_steps,   // time in which no step is under way
  pauses,          // long breaks, not in every step
};

struct Verdict {
  Finding finding = Finding::all_well;
  int rank = -1;    // of straggler and late_starter
  int bucket = -1;  // waited for longest; -1 is none
  std::string sentence;
  std::vector<std::string> why;
  std::vector<std::string> remedies;
};

Verdict judge(const Analysis& analysis);

}  // namespace paceline::report
