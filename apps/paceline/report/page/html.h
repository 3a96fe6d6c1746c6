#pragma once

#include <string>
#include <string_view>

namespace paceline::report {

// Text for HTML and for its attributes, whatever is in it.
std::string escaped(std::string_view text);

// A position or size along a drawing: "12.34%" for 0.1234.
std::string percent(double part);

}  // namespace paceline::report
