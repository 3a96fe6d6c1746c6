#include "distributed/make_group.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

#include <paceline/error.h>

#include "base/deadline.h"
#include "distributed/debug/flight_recorder.h"
#include "distributed/translate.h"

namespace paceline::distributed {

std::chrono::milliseconds checked_timeout(std::chrono::milliseconds timeout) {
  if (timeout > std::chrono::milliseconds(0)) return std::min(timeout, base::Deadline::kLongest);
  throw UsageError(fmt::format("timeout of {} ms: it must be positive", timeout.count()));
}

namespace {

[[noreturn]] void refuse_size(const std::string& backend, int ranks, int most) {
  throw UsageError(fmt::format(
      "a group of {} ranks: the backend {} has groups of up to {}; use the backend gloo", ranks,
      backend, most));
}

}  // namespace

void check_size(const std::string& backend, int ranks) {
  const BackendKind* const across = find_backend(backend, true);
  const int most = std::max(find_backend(backend).max_ranks, across ? across->max_ranks : 0);
  if (ranks > most) refuse_size(backend, ranks, most);
}

void check_reach(const std::string& backend, const std::string& group, const Topology& topology,
                 std::span<const int> ranks) {
  const std::size_t nodes = topology.nodes_of(ranks).size();
  if (const BackendKind* const kind = find_backend(backend, nodes > 1)) {
    const auto size = static_cast<int>(ranks.size());
    if (size > kind->max_ranks) refuse_size(backend, size, kind->max_ranks);
    return;
  }
  throw UsageError(fmt::format(
      "in this build, which has no libsodium, the backend {} reaches the ranks of one node, but "
      "group {} spans {} nodes (by {}): {}. Use the backend gloo; groups within one node may use "
      "{}",
      backend, group, nodes, topology.source(), topology.describe(ranks), backend));
}

std::vector<int> nodes_of(const Topology& topology, std::span<const int> ranks) {
  std::vector<int> nodes;
  if (topology.nodes() == 1) return nodes;
  for (const int rank : ranks) nodes.push_back(topology.node_of(rank));
  return nodes;
}

c10::intrusive_ptr<c10d::ProcessGroup> make_group(const std::string& backend_name,
                                                  BackendRequest request) {
  const bool several_nodes = std::set(request.nodes.begin(), request.nodes.end()).size() > 1;
  const BackendKind& kind = *find_backend(backend_name, several_nodes);  // see check_reach
  if (request.enable_reconfigure && !kind.reconfigures) {
    throw UsageError(fmt::format(
        "enable_reconfigure: the ranks of a group over the backend {} cannot change; use paceline",
        backend_name));
  }
  auto group = c10::make_intrusive<c10d::ProcessGroup>(request.store, request.rank, request.size);
  const std::string name = request.group_name;
  const std::vector<int> members = request.members;
  auto backend =
      translate(fmt::format("forming group {} over the backend {}", name, backend_name).c_str(),
                [&] { return kind.make(std::move(request)); });
  group->setBackend(c10::DeviceType::CPU, kind.type, backend);
  group->setDefaultBackend(kind.type);
  group->setGroupName(name);
  attach_flight_recorder(group, members);
  return group;
}

}  // namespace paceline::distributed
