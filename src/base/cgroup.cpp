#include "base/cgroup.h"

#include <fmt/format.h>

#include <fstream>
#include <string>
#include <system_error>

namespace paceline::base {

Cgroup find_cgroup(std::string_view controller, const std::filesystem::path& membership,
                   const std::filesystem::path& mount) {
  Cgroup found{mount, mount};
  const std::string wanted = fmt::format(",{},", controller);
  std::ifstream file(membership);
  for (std::string line; std::getline(file, line);) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const auto controllers = ',' + line.substr(first + 1, second - first - 1) + ',';
    const auto path = std::filesystem::path(line.substr(second + 1)).relative_path();
    if (controllers.find(wanted) != std::string::npos) {
      return {mount / controller, mount / controller / path};
    }
    if (controllers == ",,") found.group = mount / path;
  }
  return found;
}

std::string cpu_cgroup_identity() {
  std::error_code error;
  const auto space = std::filesystem::read_symlink("/proc/self/ns/cgroup", error);
  return error ? "" : fmt::format("{} {}", space.string(), find_cgroup("cpu").group.string());
}

}  // namespace paceline::base
