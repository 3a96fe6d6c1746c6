#pragma once

#include <optional>
#include <string>
#include <vector>

namespace paceline::doctor {

struct Options {
  bool json = false;
  bool self_test = true;
  std::string self_test_rank{};  // this process is a rank of the self-test of this backend
};

// Empty if the arguments ask for help; `help` is its text then. Throws UsageError.
std::optional<Options> parse_options(std::vector<std::string> arguments, std::string& help);

}  // namespace paceline::doctor
