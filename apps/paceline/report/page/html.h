#pragma once

#include <map>
#include <string>
#include <string_view>

namespace paceline::report {

// Escapes any text for HTML and its attributes.
std::string escaped(std::string_view text);

// `html` with each {{name}} replaced by its value, which is HTML already. Each name in it must be
// one of `values`.
std::string filled(std::string_view html, const std::map<std::string_view, std::string>& values);

// A position or size along a drawing: "12.34%" for 0.1234.
std::string percent(double part);

}  // namespace paceline::report
