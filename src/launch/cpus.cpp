#include "launch/cpus.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <string>
#include <tuple>
#include <utility>

namespace paceline::launch {
namespace {

namespace fs = std::filesystem;

// A set of CPUs, as the kernel writes it ("0,4" or "0-1"), begins with the lowest.
int read_first_number(const fs::path& file, int otherwise) {
  std::ifstream stream(file);
  int number = 0;
  return stream >> number && number >= 0 ? number : otherwise;
}

// The kernel links each CPU's directory to its node's, as "node1".
int read_node(const fs::path& cpu) {
  std::error_code error;
  for (fs::directory_iterator at(cpu, error), end; !error && at != end; at.increment(error)) {
    const std::string name = at->path().filename();
    if (name.starts_with("node") && name.find_first_not_of("0123456789", 4) == name.npos &&
        name.size() > 4 && name.size() < 10) {
      return std::stoi(name.substr(4));
    }
  }
  return 0;
}

using PhysicalCore = std::vector<int>;  // its CPUs

// The physical cores of each package and node, in order.
std::vector<std::vector<PhysicalCore>> group_by_place(const std::vector<Cpu>& cpus) {
  std::map<std::pair<int, int>, std::map<int, PhysicalCore>> places;
  for (const Cpu& cpu : cpus) places[{cpu.package, cpu.node}][cpu.core].push_back(cpu.number);
  std::vector<std::vector<PhysicalCore>> groups;
  for (auto& [place, cores] : places) {
    std::vector<PhysicalCore>& group = groups.emplace_back();
    for (auto& [number, core] : cores) {
      std::sort(core.begin(), core.end());
      group.push_back(std::move(core));
    }
  }
  return groups;
}

// The first thread of each core, then the second of each, and so on.
std::vector<int> one_thread_after_another(const std::vector<PhysicalCore>& cores) {
  std::vector<int> cpus;
  std::size_t most = 0;
  for (const PhysicalCore& core : cores) most = std::max(most, core.size());
  for (std::size_t thread = 0; thread < most; ++thread) {
    for (const PhysicalCore& core : cores) {
      if (thread < core.size()) cpus.push_back(core[thread]);
    }
  }
  return cpus;
}

// Parts of `each` cores. Those that no single group can hold are made of what the groups have left.
std::vector<std::vector<PhysicalCore>> split(const std::vector<std::vector<PhysicalCore>>& groups,
                                             std::size_t each) {
  std::vector<std::vector<PhysicalCore>> parts;
  std::vector<PhysicalCore> left;
  const auto take = [&](const std::vector<PhysicalCore>& cores) {
    const std::size_t whole = cores.size() / each * each;
    for (std::size_t at = 0; at < whole; at += each) {
      const auto first = cores.begin() + static_cast<std::ptrdiff_t>(at);
      parts.emplace_back(first, first + static_cast<std::ptrdiff_t>(each));
    }
    return std::vector(cores.begin() + static_cast<std::ptrdiff_t>(whole), cores.end());
  };
  for (const auto& group : groups) {
    const auto rest = take(group);
    left.insert(left.end(), rest.begin(), rest.end());
  }
  take(left);
  return parts;
}

}  // namespace

std::vector<Cpu> read_cpus(const std::vector<int>& numbers, const fs::path& root) {
  std::vector<Cpu> cpus;
  for (const int number : numbers) {
    const fs::path cpu = root / ("cpu" + std::to_string(number));
    const fs::path topology = cpu / "topology";
    cpus.push_back({.number = number,
                    .package = read_first_number(topology / "physical_package_id", 0),
                    .node = read_node(cpu),
                    .core = read_first_number(topology / "thread_siblings_list", number)});
  }
  return cpus;
}

std::vector<std::vector<int>> assign_cpus(const std::vector<Cpu>& cpus, int ranks) {
  const auto count = static_cast<std::size_t>(ranks);
  if (ranks < 1 || cpus.size() < count) return {};
  const auto groups = group_by_place(cpus);
  std::vector<PhysicalCore> all;
  for (const auto& group : groups) all.insert(all.end(), group.begin(), group.end());

  std::vector<std::vector<int>> assigned;
  if (all.size() < count) {
    const std::vector<int> order = one_thread_after_another(all);
    for (std::size_t rank = 0; rank < count; ++rank) assigned.push_back({order[rank]});
    return assigned;
  }
  for (const auto& part : split(groups, all.size() / count)) {
    if (assigned.size() < count) assigned.push_back(one_thread_after_another(part));
  }
  std::size_t least = assigned.front().size();
  for (const auto& own : assigned) least = std::min(least, own.size());
  for (auto& own : assigned) {
    own.resize(least);
    std::sort(own.begin(), own.end());
  }
  return assigned;
}

}  // namespace paceline::launch
