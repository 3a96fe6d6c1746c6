#pragma once

#include "options.h"

namespace paceline::bench {

// The main of one rank, under launch::run_job: measures what the options select. Rank 0 writes each
// Result to standard output, as to_line gives it. Returns the exit code.
int run_worker(const Options& options);

}  // namespace paceline::bench
