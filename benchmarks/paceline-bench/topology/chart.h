#pragma once

#include <vector>

#include "drawing/line_chart.h"
#include "measure/result.h"
#include "options.h"

namespace paceline::bench {

// The times of the algorithms over the numbers of ranks, beside theory if there are links.
drawing::LineChart topology_chart(const Options& options, const std::vector<Result>& results);

}  // namespace paceline::bench
