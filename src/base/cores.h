#pragma once

#include <filesystem>

namespace paceline::base {

// The number of cores this process may use, at least 1: the smaller of its affinity mask and its
// cgroup's CPU quota (rounded up), as in a container.
int available_cores();

// The quota of the cgroup directory `cgroup` and its ancestors up to `root`, in cores rounded up;
// 0 if there is none. Reads version 2's cpu.max and version 1's cpu.cfs_quota_us.
int cgroup_cores(const std::filesystem::path& root, const std::filesystem::path& cgroup);

}  // namespace paceline::base
