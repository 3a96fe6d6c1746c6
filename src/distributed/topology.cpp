#include "distributed/topology.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <numeric>
#include <sstream>
#include <string_view>

#include <paceline/error.h>

#include "base/address.h"
#include "base/cgroup.h"
#include "base/cores.h"
#include "shm/membership/endpoint.h"
#include "shm/membership/rank_set.h"

namespace paceline::distributed {
namespace {

// How many nodes a message lists before it only counts.
constexpr std::size_t kMaxNodes = 8;

using shm::describe_ranks;
using shm::RankSet;

// "0 1 2", as encode writes it.
std::optional<Placement::Variables> parse_variables(const std::string& text) {
  std::array<int, 3> numbers{};
  std::istringstream stream(text);
  for (int& number : numbers) {
    if (!(stream >> number) || number < 0) return std::nullopt;
  }
  if (!(stream >> std::ws).eof() || numbers[1] >= numbers[2]) return std::nullopt;
  return Placement::Variables{numbers[0], numbers[1], numbers[2]};
}

[[noreturn]] void refuse(const std::string& what) {
  throw UsageError(
      what +
      ". A launcher sets GROUP_RANK (the node), LOCAL_RANK and LOCAL_WORLD_SIZE for each process; "
      "correct them, or unset them on every rank to have each machine taken for a node");
}

// Whether these ranks are all of one node that was started with --virtual-local-rank.
bool are_virtual(const std::vector<int>& ranks, std::span<const Placement> placements) {
  const Placement& first = placements[static_cast<std::size_t>(ranks.front())];
  return std::cmp_equal(ranks.size(), first.variables->local_size) &&
         std::ranges::all_of(ranks, [&](int rank) {
           const Placement& one = placements[static_cast<std::size_t>(rank)];
           return one.variables->local_rank == 0 && one.machine == first.machine;
         });
}

void check_node(int node, const std::vector<int>& ranks, std::span<const Placement> placements) {
  const auto said_by = [&](int rank) -> const Placement::Variables& {
    return *placements[static_cast<std::size_t>(rank)].variables;
  };
  const int first = ranks.front();
  const int size = said_by(first).local_size;
  const bool virtual_ranks = are_virtual(ranks, placements);
  std::map<int, int> by_local_rank;
  for (const int rank : ranks) {
    if (said_by(rank).local_size != size) {
      refuse(
          fmt::format("rank {} has LOCAL_WORLD_SIZE={} and rank {} has LOCAL_WORLD_SIZE={}, and "
                      "both have GROUP_RANK={}",
                      first, size, rank, said_by(rank).local_size, node));
    }
    const int local_rank = said_by(rank).local_rank;
    const auto [other, fresh] = by_local_rank.emplace(local_rank, rank);
    if (!fresh && !virtual_ranks) {
      refuse(fmt::format("ranks {} and {} have the same GROUP_RANK={} and LOCAL_RANK={}",
                         other->second, rank, node, local_rank));
    }
  }
  if (std::cmp_equal(ranks.size(), size)) return;
  refuse(fmt::format("GROUP_RANK={} belongs to {}, but LOCAL_WORLD_SIZE={} there", node,
                     describe_ranks(RankSet(ranks)), size));
}

void check_variables(std::span<const Placement> placements) {
  std::map<int, std::vector<int>> nodes;
  for (std::size_t rank = 0; rank < placements.size(); ++rank) {
    nodes[placements[rank].variables->node].push_back(static_cast<int>(rank));
  }
  int next = 0;
  for (const auto& [node, ranks] : nodes) {
    if (node != next) {
      refuse(fmt::format("{} ha{} GROUP_RANK={}, and no rank has GROUP_RANK={}",
                         describe_ranks(RankSet(ranks)), ranks.size() == 1 ? "s" : "ve", node,
                         next));
    }
    ++next;
    check_node(node, ranks, placements);
  }
}

}  // namespace

Placement Placement::own(const base::Environment& environment, bool launched) {
  Placement own{std::nullopt, shm::machine_identity(), base::host_name(), base::affinity(),
                base::cpu_cgroup_identity()};
  if (launched && environment.node_rank && environment.local_rank && environment.local_world_size) {
    own.variables = {*environment.node_rank, *environment.local_rank,
                     *environment.local_world_size};
  }
  return own;
}

std::string Placement::encode() const {
  const std::string numbers = variables ? fmt::format("{} {} {}", variables->node,
                                                      variables->local_rank, variables->local_size)
                                        : "";
  return fmt::format("{}\n{}\n{}\n{}\n{}\n", numbers, machine, host, fmt::join(cpus, " "), cgroup);
}

std::optional<Placement> Placement::decode(const std::string& text) {
  std::array<std::string, 5> lines;
  std::istringstream stream(text);
  for (std::string& line : lines) {
    if (!std::getline(stream, line) || stream.eof()) return std::nullopt;
  }
  Placement placement{std::nullopt, lines[1], lines[2], {}, lines[4]};
  if (placement.machine.empty()) return std::nullopt;
  std::istringstream cpus(lines[3]);
  for (int cpu = 0; cpus >> cpu;) placement.cpus.push_back(cpu);
  if (!cpus.eof()) return std::nullopt;
  if (lines[0].empty()) return placement;
  placement.variables = parse_variables(lines[0]);
  if (!placement.variables) return std::nullopt;
  return placement;
}

Topology::Topology(std::span<const Placement> placements)
    : by_variables_(std::ranges::all_of(
          placements, [](const Placement& one) { return one.variables.has_value(); })) {
  if (by_variables_) check_variables(placements);
  std::map<std::string, int> machines;
  for (const Placement& placement : placements) {
    const int node =
        by_variables_
            ? placement.variables->node
            : machines.emplace(placement.machine, static_cast<int>(machines.size())).first->second;
    if (node >= nodes()) nodes_.resize(static_cast<std::size_t>(node) + 1);
    Node& its = nodes_[static_cast<std::size_t>(node)];
    if (its.ranks.empty()) its.host = placement.host;
    const auto before = static_cast<int>(its.ranks.size());
    its.ranks.push_back(size());
    its.cpus.insert(placement.cpus.begin(), placement.cpus.end());
    its.masks += placement.cpus.size();
    places_.push_back(
        {node, by_variables_ ? placement.variables->local_rank : before, placement.cgroup});
  }
}

std::vector<int> every_rank(int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

Topology Topology::one_node(int size) {
  return Topology(std::vector<Placement>(static_cast<std::size_t>(size)));
}

Topology Topology::one_node_of_virtual_ranks(int size) {
  const Placement one{Placement::Variables{0, 0, size}, "", ""};
  return Topology(std::vector<Placement>(static_cast<std::size_t>(size), one));
}

int Topology::in_cgroup_of(int rank) const {
  const auto cgroup_of = [&](int one) { return places_.at(static_cast<std::size_t>(one)).cgroup; };
  return static_cast<int>(std::ranges::count(ranks_on(node_of(rank)), cgroup_of(rank), cgroup_of));
}

std::vector<int> Topology::nodes_of(std::span<const int> ranks) const {
  std::set<int> nodes;
  for (const int rank : ranks) nodes.insert(node_of(rank));
  return {nodes.begin(), nodes.end()};
}

std::string Topology::describe(std::span<const int> ranks) const {
  std::map<int, RankSet> by_node;
  for (const int rank : ranks) by_node[node_of(rank)].insert(rank);
  std::string text;
  std::size_t listed = 0;
  for (const auto& [node, its] : by_node) {
    if (listed++ == kMaxNodes) {
      return text + fmt::format(" and more on {} other nodes", by_node.size() - kMaxNodes);
    }
    const std::string& host = host_of(node);
    text += fmt::format("{}{} on node {}{}", text.empty() ? "" : ", ", describe_ranks(its), node,
                        host.empty() ? "" : fmt::format(" ({})", host));
  }
  return text;
}

}  // namespace paceline::distributed
