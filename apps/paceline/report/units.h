#pragma once

#include <cstdint>
#include <string>

namespace paceline::report {

std::string time_text(double microseconds);   // "840 us", "12.3 ms", "1.25 s"
std::string share_text(double part);          // "31 %"
std::string bytes_text(std::uint64_t bytes);  // "512 B", "25.0 MiB"

}  // namespace paceline::report
