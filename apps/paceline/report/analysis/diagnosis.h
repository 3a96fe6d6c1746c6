#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "report/analysis/analysis.h"

namespace paceline::report {

// The bottleneck of a run. The comments are the rows of docs/timeline.md, in another order.
enum class Finding {
  too_few_steps,   // the report needs at least eight steps
  all_well,        // all is well
  straggler,       // one rank is slow
  slow_ranks,      // several ranks are slow
  late_starter,    // one rank begins its steps late
  too_many_ranks,  // there are more ranks than cores
  same_cores,      // ranks are bound to the same cores
  cpu_limit,       // the CPU limit of a cgroup stops ranks
  shared_cores,    // the cores are shared, with other work or the job's own threads
  memory,          // the machine lacks memory
  uneven_load,     // the load is uneven: which rank is late changes from step to step
  communication,   // communication is exposed: ranks wait though all have published
  delayed,         // so they do, for longer than any network needs
  short_steps,     // steps are too short
  between_steps,   // time passes between steps
  pauses,          // long pauses, after single steps
};

// As it is called in the JSON of `paceline report --json`: "straggler".
std::string_view name_of(Finding finding);

// What a step would take, in microseconds.
struct Prediction {
  std::string if_what;  // "rank 2 were as fast as the others"
  double before = 0;
  double after = 0;
};

struct Remedy {
  std::string text;
  std::optional<Prediction> prediction;
};

struct Diagnosis {
  Finding finding = Finding::all_well;
  int rank = -1;    // of straggler and late_starter
  int bucket = -1;  // waited for longest; -1 is none
  std::string sentence;
  std::vector<std::string> why;
  std::vector<Remedy> remedies;
};

Diagnosis diagnose(const Analysis& analysis);

// "If rank 2 were as fast as the others: 18.1 ms -> 14.0 ms a step."
std::string text_of(const Prediction& prediction);

}  // namespace paceline::report
