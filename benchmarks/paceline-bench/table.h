#pragma once

#include <string>

#include "measure/result.h"
#include "options.h"

namespace paceline::bench {

// Results as text, at most 120 columns wide; lines ended by '\n'.
std::string table_heading(const Options& options, int ranks);
std::string table_rows(const Options& options, const Result& result);

// "4 B", "64 KiB", "25 MiB".
std::string describe_bytes(std::int64_t bytes);
// Microseconds with three digits that count: "0.31 us", "46.2 us", "18.4 ms", "1.20 s".
std::string describe_time(double us);

}  // namespace paceline::bench
