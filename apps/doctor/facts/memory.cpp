#include "facts/memory.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>

#include "shm/region.h"

namespace paceline::doctor {
namespace {

namespace fs = std::filesystem;

std::optional<std::uint64_t> read_number(const fs::path& path) {
  std::ifstream file(path);
  std::uint64_t number = 0;
  return file >> number ? std::optional(number) : std::nullopt;  // "max" is no number
}

void read_meminfo(const fs::path& path, MemoryFacts& facts) {
  std::ifstream file(path);
  std::string name;
  std::uint64_t kibibytes = 0;
  for (std::string unit; file >> name >> kibibytes; std::getline(file, unit)) {
    if (name == "MemTotal:") facts.total = kibibytes << 10;
    if (name == "MemAvailable:") facts.available = kibibytes << 10;
    if (name == "SwapTotal:") facts.swap_total = kibibytes << 10;
    if (name == "SwapFree:") facts.swap_free = kibibytes << 10;
  }
}

// Files in the page cache that were not used lately count as used, but are dropped on demand.
std::uint64_t droppable(const fs::path& group) {
  std::ifstream file(group / "memory.stat");
  std::string name;
  for (std::uint64_t bytes = 0; file >> name >> bytes;) {
    if (name == "inactive_file" || name == "total_inactive_file") return bytes;
  }
  return 0;
}

// Keeps the group that has the least left. Versions 2 and 1 of control groups have other names.
// Without a limit, version 1 has a huge one.
void read_group(const fs::path& group, MemoryFacts& facts) {
  auto limit = read_number(group / "memory.max");
  auto used = read_number(group / "memory.current");
  if (!limit) limit = read_number(group / "memory.limit_in_bytes");
  if (!used) used = read_number(group / "memory.usage_in_bytes");
  if (!limit || *limit >= facts.total) return;
  const auto kept = used.value_or(0) - std::min(used.value_or(0), droppable(group));
  const auto left_of = [](std::uint64_t all, std::uint64_t taken) {
    return all - std::min(all, taken);
  };
  if (facts.limit && left_of(*limit, kept) >= left_of(*facts.limit, facts.used_of_limit)) return;
  facts.limit = limit;
  facts.used_of_limit = kept;
}

}  // namespace

MemoryFacts read_memory(int ranks, const fs::path& proc, const base::Cgroup& cgroup) {
  MemoryFacts facts;
  read_meminfo(proc / "meminfo", facts);
  for (fs::path at = cgroup.group;; at = at.parent_path()) {
    read_group(at, facts);
    if (at == cgroup.root || at == at.parent_path()) break;
  }
  const auto pages = read_number(proc / "self" / "statm").value_or(0);
  facts.mapped = pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  facts.region = shm::Region::layout(ranks, {}).total();
  return facts;
}

}  // namespace paceline::doctor
