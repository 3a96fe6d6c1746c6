#pragma once

#include <string>

#include "measure/result.h"
#include "options.h"

namespace paceline::bench {

// Results of measure_topology as text, at most 120 columns wide; lines ended by '\n'.
std::string topology_heading(const Options& options, int ranks);
std::string topology_rows(const Result& result);

// "1.00 MiB"; of a smallest and a largest number: "0.50-3.50 MiB".
std::string describe_range(std::int64_t smallest, std::int64_t largest);

}  // namespace paceline::bench
