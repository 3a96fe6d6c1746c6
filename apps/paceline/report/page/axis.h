#pragma once

#include <string>
#include <vector>

namespace paceline::report {

// Round times from 0 to at most `extent` microseconds, no more than can stand side by side on a
// narrow screen.
std::vector<double> axis_ticks(double extent);
std::string tick_text(double microseconds);  // "5 ms"

}  // namespace paceline::report
