#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <vector>

namespace paceline::base {

// The number of cores that this process may use, at least 1: the size of its affinity mask, or its
// cgroup's CPU quota (rounded up) if that is smaller, as in a container.
int available_cores();

// The CPU quota of this process's cgroup in cores, rounded up; 0 if there is none.
int core_quota();

// The cores in the calling thread's affinity mask, in ascending order; empty if the kernel does not
// report them.
std::vector<int> affinity();

// The quota of the cgroup directory `cgroup` and its ancestors up to `root`, in cores rounded up;
// 0 if there is no quota. Reads version 2's cpu.max and version 1's cpu.cfs_quota_us.
int cgroup_cores(const std::filesystem::path& root, const std::filesystem::path& cgroup);

// For how long the CPU limits of this process's cgroup and its ancestors stopped it, in
// microseconds summed over cores; -1 if the kernel does not report it.
std::int64_t throttled_time();

// The same for the cgroup directory `cgroup` and its ancestors up to `root`. Reads cpu.stat of
// version 2 and 1.
std::int64_t cgroup_throttled_time(const std::filesystem::path& root,
                                   const std::filesystem::path& cgroup);

// The size in bytes of the largest cache of `cpu`, a directory in the format of the Linux kernel,
// whether other cores share it or not; 0 if the kernel does not report it.
std::size_t last_level_cache(const std::filesystem::path& cpu = "/sys/devices/system/cpu/cpu0");

}  // namespace paceline::base
