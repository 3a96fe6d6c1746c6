#pragma once

#include <functional>

#include "measure/result.h"
#include "options.h"

namespace paceline::bench {

// What a rank does: measures what the options select. `on_result` is called on rank 0. Returns the
// exit code.
int run_worker(const Options& options, const std::function<void(const Result&)>& on_result);

}  // namespace paceline::bench
