#pragma once

#include <string>
#include <string_view>

namespace paceline::base {

// Text of another process or of a file, in which control characters and bytes that are not UTF-8
// are spelled out, as \x1b: a terminal would obey them. Lines and tabs stay.
std::string printable(std::string_view text);

// The same for text that must fit into a line: newlines and tabs are spelled out, too.
std::string printable_line(std::string_view text);

}  // namespace paceline::base
