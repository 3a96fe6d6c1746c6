#pragma once

#include <functional>

#include "measure/result.h"
#include "options.h"

namespace paceline::bench {

// What rank 0 does with each result.
using OnResult = std::function<void(const Result&)>;

// What a rank does: measures what the options select. `begin` is called on rank 0, once the world
// is formed, so that the other ranks end if it throws. Returns the exit code.
int run_worker(const Options& options, const std::function<OnResult()>& begin);

}  // namespace paceline::bench
