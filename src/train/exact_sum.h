#pragma once

#include <vector>

namespace paceline::train {

// Adds to a sum without rounding. `partials`: finite numbers, whose exact sum it is; they grow in
// magnitude, and no two have bits of the same weight. Shewchuk, "Adaptive Precision Floating-Point
// Arithmetic and Fast Robust Geometric Predicates", 1997. An infinity or a NaN, also by overflow,
// makes the sum one.
void add_exactly(std::vector<double>& partials, double value);

// The sum, rounded once.
double round_sum(const std::vector<double>& partials);

}  // namespace paceline::train
