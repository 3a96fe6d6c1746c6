#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace paceline::base {

// A control group of this process, as a directory; `root` is where its hierarchy is mounted. Limits
// of the group and of all its ancestors up to the root apply.
struct Cgroup {
  std::filesystem::path root;
  std::filesystem::path group;
};

// The group that limits what `controller` ("cpu", "memory") controls. `membership` has the format
// of /proc/self/cgroup: a line "0::/a/b" (version 2), or "4:cpu,cpuacct:/a/b" (version 1), whose
// hierarchy is mounted at a directory of the controller's name.
Cgroup find_cgroup(std::string_view controller,
                   const std::filesystem::path& membership = "/proc/self/cgroup",
                   const std::filesystem::path& mount = "/sys/fs/cgroup");

// Tells the control group of this process for CPU time from those of other processes on this
// machine, also of those in other containers; empty if /proc does not say.
std::string cpu_cgroup_identity();

}  // namespace paceline::base
