#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace paceline::base {

// The one of `names` that differs least from a name that is wrong, to ask whether it was meant.
// Empty if all differ in more than a third of the characters (one, of short names).
std::string nearest_name(std::string_view wrong, const std::vector<std::string>& names);

}  // namespace paceline::base
