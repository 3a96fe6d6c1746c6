#pragma once

#include <string>

namespace paceline::doctor {

// One of the two ranks of a self-test. Returns the exit code.
int run_self_test_rank(const std::string& backend);

}  // namespace paceline::doctor
