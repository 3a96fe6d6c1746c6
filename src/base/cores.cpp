#include "base/cores.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <optional>
#include <string>
#include <thread>

#include "base/cgroup.h"

namespace paceline::base {
namespace {

namespace fs = std::filesystem;

std::optional<double> read_quota(const fs::path& directory) {
  double quota = 0;
  double period = 0;
  if (std::ifstream file(directory / "cpu.max"); file >> quota >> period && period > 0) {
    return quota / period;  // "max" is not a number: no limit
  }
  std::ifstream quota_file(directory / "cpu.cfs_quota_us");
  std::ifstream period_file(directory / "cpu.cfs_period_us");
  if (quota_file >> quota && period_file >> period && quota > 0 && period > 0) {
    return quota / period;
  }
  return std::nullopt;
}

Throttling read_throttling(const fs::path& directory) {
  Throttling found;
  std::ifstream file(directory / "cpu.stat");
  std::string name;
  for (std::int64_t value = 0; file >> name >> value;) {
    if (name == "nr_periods") found.periods = value;
    if (name == "nr_throttled") found.throttled = value;
  }
  return found;
}

int affinity_cores(pid_t process) {
  const std::vector<int> cores = affinity(process);
  return static_cast<int>(cores.empty() ? std::thread::hardware_concurrency() : cores.size());
}

Cgroup cpu_cgroup(pid_t process) {
  const std::string name = process == 0 ? "self" : std::to_string(process);
  return find_cgroup("cpu", fs::path("/proc") / name / "cgroup");
}

}  // namespace

std::vector<int> affinity(pid_t process) {
  std::vector<int> cores;
  CpuSet set{};
  if (::sched_getaffinity(process, sizeof(set), set.data()) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE * static_cast<int>(set.size()); ++core) {
    if (CPU_ISSET_S(core, sizeof(set), set.data())) cores.push_back(core);
  }
  return cores;
}

int cgroup_cores(const fs::path& root, const fs::path& cgroup) {
  std::optional<double> tightest;
  for (fs::path at = cgroup;; at = at.parent_path()) {
    if (const auto quota = read_quota(at)) {
      tightest = tightest ? std::min(*tightest, *quota) : *quota;
    }
    if (at == root || at == at.parent_path()) break;
  }
  return tightest ? std::max(1, static_cast<int>(std::ceil(*tightest))) : 0;
}

int core_quota(pid_t process) {
  const Cgroup cgroup = cpu_cgroup(process);
  return cgroup_cores(cgroup.root, cgroup.group);
}

std::vector<Throttling> cgroup_throttling(const fs::path& root, const fs::path& cgroup) {
  std::vector<Throttling> groups;
  for (fs::path at = cgroup;; at = at.parent_path()) {
    groups.push_back(read_throttling(at));
    if (at == root || at == at.parent_path()) return groups;
  }
}

Throttling most_throttled(const std::vector<Throttling>& before,
                          const std::vector<Throttling>& now) {
  Throttling most;
  for (std::size_t i = 0; i < std::min(before.size(), now.size()); ++i) {
    if (before[i].throttled < 0 || now[i].throttled < 0) continue;
    const auto throttled = std::max<std::int64_t>(0, now[i].throttled - before[i].throttled);
    if (throttled <= most.throttled) continue;
    most = {std::max<std::int64_t>(0, now[i].periods - before[i].periods), throttled};
  }
  return most;
}

std::vector<Throttling> throttling(pid_t process) {
  const Cgroup cgroup = cpu_cgroup(process);
  return cgroup_throttling(cgroup.root, cgroup.group);
}

int available_cores(pid_t process) {
  const int quota = core_quota(process);
  const int cores = std::max(1, affinity_cores(process));
  return quota > 0 ? std::min(cores, quota) : cores;
}

std::size_t last_level_cache(const fs::path& cpu) {
  std::size_t largest = 0;
  for (int index = 0;; ++index) {
    std::ifstream file(cpu / "cache" / ("index" + std::to_string(index)) / "size");
    std::size_t kibibytes = 0;  // the kernel's unit: "32768K"
    if (!(file >> kibibytes)) return largest;
    largest = std::max(largest, kibibytes << 10);
  }
}

}  // namespace paceline::base
