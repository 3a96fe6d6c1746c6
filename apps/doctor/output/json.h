#pragma once

#include <string>
#include <vector>

#include "check.h"

namespace paceline::doctor {

// The document of `--json`, as docs/doctor.md describes it.
std::string json_of(const std::vector<Group>& groups);

}  // namespace paceline::doctor
