#pragma once

#include <string>
#include <vector>

#include "check.h"

namespace paceline::doctor {

// A heading, and a line for each check. Those that are ok and say nothing share one.
std::string text_of(const Group& group, bool colours);

// "no errors, 1 warning".
std::string summary(const std::vector<Group>& groups, bool colours);

}  // namespace paceline::doctor
