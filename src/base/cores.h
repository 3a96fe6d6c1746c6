#pragma once

#include <sched.h>
#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <vector>

namespace paceline::base {

// For 8192 CPUs, as many as Linux supports; a cpu_set_t has 1024.
using CpuSet = std::array<cpu_set_t, 8>;

// `process`: 0 is this one, or for an affinity mask the calling thread.

// The number of cores that a process may use, at least 1: the size of its affinity mask, or its
// cgroup's CPU quota (rounded up) if that is smaller, as in a container.
int available_cores(pid_t process = 0);

// The CPU quota of a process's cgroup in cores, rounded up; 0 if there is none.
int core_quota(pid_t process = 0);

// The cores in the affinity mask of a process's main thread, or of any thread, in ascending order;
// empty if the kernel does not report them.
std::vector<int> affinity(pid_t process = 0);

// The quota of the cgroup directory `cgroup` and its ancestors up to `root`, in cores rounded up;
// 0 if there is no quota. Reads version 2's cpu.max and version 1's cpu.cfs_quota_us.
int cgroup_cores(const std::filesystem::path& root, const std::filesystem::path& cgroup);

// How often a CPU limit was used up.
struct Throttling {
  std::int64_t periods = -1;    // of the limit, in which the group ran; -1 if not reported
  std::int64_t throttled = -1;  // of these, the ones in which the limit stopped it
};

// Since they were made, a process's cgroup and its ancestors.
std::vector<Throttling> throttling(pid_t process = 0);

// The same for the cgroup directory `cgroup` and its ancestors up to `root`. Reads cpu.stat.
std::vector<Throttling> cgroup_throttling(const std::filesystem::path& root,
                                          const std::filesystem::path& cgroup);

// Between two such readings, the group that was stopped most often.
Throttling most_throttled(const std::vector<Throttling>& before,
                          const std::vector<Throttling>& now);

// The size in bytes of the largest cache of `cpu`, a directory in the format of the Linux kernel,
// whether other cores share it or not; 0 if the kernel does not report it.
std::size_t last_level_cache(const std::filesystem::path& cpu = "/sys/devices/system/cpu/cpu0");

}  // namespace paceline::base
