#include <paceline/error.h>

#include "train/yaml_file.h"

namespace paceline::train {
namespace {

[[noreturn]] void throw_no_yaml() {
  throw UsageError(
      "Paceline was built without yaml-cpp, which Config needs: on Debian, apt-get install "
      "libyaml-cpp-dev, and build it again");
}

}  // namespace

std::vector<ConfigValue> parse_yaml(const std::string& /*content*/, const std::string& /*path*/) {
  throw_no_yaml();
}

std::vector<std::string> parse_yaml_list(const std::string& /*text*/,
                                         const std::string& /*source*/) {
  throw_no_yaml();
}

std::string write_yaml(const std::vector<ConfigValue>& /*values*/) {
  throw_no_yaml();
}

}  // namespace paceline::train
