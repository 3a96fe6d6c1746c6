#pragma once

#include <string>
#include <vector>

#include "report/analysis/analysis.h"

namespace paceline::report {

// The bottleneck of a run. The comments are the rows of docs/timeline.md, in another order.
enum class Finding {
  too_few_steps,   // the report needs at least eight steps
  all_well,        // all is well
  straggler,       // one rank is slow
  late_starter,    // one rank begins its steps late
  too_many_ranks,  // there are more ranks than cores
  shared_cores,    // the cores are shared, with other work or the job's own threads
  uneven_load,     // the load is uneven: which rank is late changes from step to step
  communication,   // communication is exposed: ranks wait though all have published
  short_steps,     // steps are too short
  between_steps,   // time passes between steps
  pauses,          // long pauses, after single steps
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
