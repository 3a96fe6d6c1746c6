#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace paceline::base {

// Ascending numbers, of cores or ranks, as the kernel writes them: "0-3,8".
std::string list_text(std::span<const int> numbers);

// The numbers of such a text. Empty if it is malformed, or if one of them is not below `end`, which
// bounds what a long text costs.
std::vector<int> parse_list(std::string_view text, int end);

}  // namespace paceline::base
