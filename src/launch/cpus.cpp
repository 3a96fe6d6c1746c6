#include "launch/cpus.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include <paceline/error.h>

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

// From the cache of the highest level.
int read_cache(const fs::path& cpu) {
  int highest = 0;
  int first = -1;
  std::error_code error;
  for (fs::directory_iterator at(cpu / "cache", error), end; !error && at != end;
       at.increment(error)) {
    const int level = read_first_number(at->path() / "level", 0);
    if (level <= highest) continue;
    highest = level;
    first = read_first_number(at->path() / "shared_cpu_list", -1);
  }
  return first;
}

using PhysicalCore = std::vector<int>;  // its CPUs
using Place = std::pair<int, int>;
using CoresByPlace = std::map<Place, std::vector<PhysicalCore>>;

template <typename PlaceOf>
CoresByPlace group_by(const std::vector<Cpu>& cpus, PlaceOf&& place_of) {
  std::map<Place, std::map<int, PhysicalCore>> places;
  for (const Cpu& cpu : cpus) places[place_of(cpu)][cpu.core].push_back(cpu.number);
  CoresByPlace result;
  for (auto& [place, cores] : places) {
    for (auto& [number, core] : cores) {
      std::sort(core.begin(), core.end());
      result[place].push_back(std::move(core));
    }
  }
  return result;
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
std::vector<std::vector<PhysicalCore>> split(const CoresByPlace& groups, std::size_t each) {
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
  for (const auto& [place, group] : groups) {
    const auto rest = take(group);
    left.insert(left.end(), rest.begin(), rest.end());
  }
  take(left);
  return parts;
}

Place domain_of(const Cpu& cpu, NumaBinding binding) {
  if (binding == NumaBinding::socket) return {cpu.package, 0};
  return {cpu.node, binding == NumaBinding::core_complex ? cpu.cache : 0};
}

// The cores of part `index` of `parts`. The first parts are larger by one core if need be.
std::vector<PhysicalCore> part_of(const std::vector<PhysicalCore>& cores, std::size_t index,
                                  std::size_t parts) {
  const std::size_t each = cores.size() / parts;
  const std::size_t larger = cores.size() % parts;
  const auto begin = static_cast<std::ptrdiff_t>(index * each + std::min(index, larger));
  const auto size = static_cast<std::ptrdiff_t>(each + (index < larger ? 1 : 0));
  return {cores.begin() + begin, cores.begin() + begin + size};
}

std::vector<int> all_cpus(const std::vector<PhysicalCore>& cores) {
  std::vector<int> cpus;
  for (const PhysicalCore& core : cores) cpus.insert(cpus.end(), core.begin(), core.end());
  std::sort(cpus.begin(), cpus.end());
  return cpus;
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
                    .core = read_first_number(topology / "thread_siblings_list", number),
                    .cache = read_cache(cpu)});
  }
  return cpus;
}

std::vector<std::vector<int>> assign_cpus(const std::vector<Cpu>& cpus, int ranks) {
  const auto count = static_cast<std::size_t>(ranks);
  if (ranks < 1 || cpus.size() < count) return {};
  const auto groups = group_by(cpus, [](const Cpu& cpu) { return Place(cpu.package, cpu.node); });
  std::vector<PhysicalCore> all;
  for (const auto& [place, group] : groups) all.insert(all.end(), group.begin(), group.end());

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

NumaCpus bind_to_numa(const std::vector<Cpu>& cpus, int ranks, NumaBinding binding) {
  if (cpus.empty()) throw UsageError("the kernel does not tell which CPUs this process may use");
  const auto domains = group_by(cpus, [&](const Cpu& cpu) { return domain_of(cpu, binding); });
  const auto count = static_cast<std::size_t>(ranks);
  NumaCpus result{.cpus = {}, .domains = static_cast<int>(domains.size())};
  std::size_t index = 0;
  for (const auto& [domain, cores] : domains) {
    // The ranks for which rank * domains / count is this domain.
    const auto first = [&](std::size_t at) {
      return (at * count + domains.size() - 1) / domains.size();
    };
    const std::size_t here = first(index + 1) - first(index);
    const bool is_exclusive = binding == NumaBinding::exclusive;
    if (is_exclusive && cores.size() < here) {
      throw UsageError(
          fmt::format("NUMA node {} has {} physical core{} for {} ranks that are to have some "
                      "each; start fewer, or bind them to the whole node",
                      domain.first, cores.size(), cores.size() == 1 ? "" : "s", here));
    }
    for (std::size_t i = 0; i < here; ++i) {
      result.cpus.push_back(all_cpus(is_exclusive ? part_of(cores, i, here) : cores));
    }
    ++index;
  }
  return result;
}

}  // namespace paceline::launch
