#pragma once

#include <cstddef>
#include <filesystem>
#include <vector>

namespace paceline::base {

// The number of cores this process may use, at least 1: the smaller of its affinity mask and its
// cgroup's CPU quota (rounded up), as in a container.
int available_cores();

// The numbers of the cores in the calling thread's affinity mask, in ascending order; none if the
// kernel does not tell.
std::vector<int> affinity();

// The quota of the cgroup directory `cgroup` and its ancestors up to `root`, in cores rounded up;
// 0 if there is none. Reads version 2's cpu.max and version 1's cpu.cfs_quota_us.
int cgroup_cores(const std::filesystem::path& root, const std::filesystem::path& cgroup);

// The bytes of the largest cache that `cpu`, a directory as of the Linux kernel, has, be it shared
// with others or not; 0 if the kernel does not tell.
std::size_t last_level_cache(const std::filesystem::path& cpu = "/sys/devices/system/cpu/cpu0");

}  // namespace paceline::base
