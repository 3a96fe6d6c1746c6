#pragma once

#include <functional>
#include <string>
#include <vector>

#include "measure/result.h"

namespace paceline::bench {

// Starts this program as `ranks` ranks with the same arguments and `threads` threads each, and
// passes on each result as it comes in; all other output of the ranks goes to stderr. Returns the
// exit code of the job.
int run_ranks(const std::vector<std::string>& arguments, int ranks, int threads,
              const std::function<void(const Result&)>& on_result);

}  // namespace paceline::bench
