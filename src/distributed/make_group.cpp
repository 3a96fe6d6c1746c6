#include "distributed/make_group.h"

#include <fmt/format.h>

#include <algorithm>
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

void check_size(const std::string& backend, int ranks) {
  const int most = find_backend(backend).max_ranks;
  if (ranks <= most) return;
  throw UsageError(fmt::format(
      "a group of {} ranks: the backend {} has groups of up to {}; use the backend gloo", ranks,
      backend, most));
}

void check_reach(const std::string& backend, const std::string& group, const Topology& topology,
                 std::span<const int> ranks) {
  if (!find_backend(backend).one_node) return;
  const std::size_t nodes = topology.nodes_of(ranks).size();
  if (nodes <= 1) return;
  throw UsageError(
      fmt::format("the backend {} reaches the ranks of one node, but group {} spans {} nodes (by "
                  "{}): {}. Use the backend gloo; groups within one node may use {}",
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
  const auto& kind = find_backend(backend_name);
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
