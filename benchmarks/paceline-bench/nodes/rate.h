#pragma once

#include <string>

namespace paceline::bench {

// A rate as tc(8) writes it, such as "100mbit" or "1gbit", in bytes a second. Throws UsageError
// unless it is from 1mbit to 1tbit.
double bytes_per_second(const std::string& rate);

}  // namespace paceline::bench
