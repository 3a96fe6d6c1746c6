#include "distributed/make_group.h"

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <utility>

#include <paceline/error.h>

#include "base/deadline.h"
#include "distributed/debug/flight_recorder.h"
#include "distributed/devices/device_backends.h"
#include "distributed/store_calls.h"
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

// A group has a store of its own for each backend.
BackendRequest request_for_cuda(const BackendRequest& request) {
  return {.store = c10::make_intrusive<c10d::PrefixStore>("cuda", request.store),
          .store_server = request.store_server,
          .rank = request.rank,
          .size = request.size,
          .timeout = request.timeout,
          .group_name = request.group_name,
          .members = request.members,
          .nodes = request.nodes,
          .check_peers = request.check_peers,
          .processes = request.processes};
}

}  // namespace

void check_size(const std::string& backends, int ranks) {
  const std::string backend = parse_backends(backends).cpu;
  const BackendKind* const across = find_backend(backend, true);
  const int most = std::max(find_backend(backend).max_ranks, across ? across->max_ranks : 0);
  if (ranks > most) refuse_size(backend, ranks, most);
}

void check_reach(const std::string& backends, const std::string& group, const Topology& topology,
                 std::span<const int> ranks) {
  const std::string backend = parse_backends(backends).cpu;
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

c10::intrusive_ptr<c10d::ProcessGroup> make_group(const std::string& backends,
                                                  BackendRequest request) {
  const DeviceBackends names = parse_backends(backends);
  const BackendKind& kind = *find_backend(names.cpu, request.spans_nodes());  // see check_reach
  if (request.enable_reconfigure && !kind.reconfigures) {
    throw UsageError(fmt::format(
        "enable_reconfigure: the ranks of a group over the backend {} cannot change; use paceline",
        names.cpu));
  }
  if (request.enable_reconfigure && names.cuda != names.cpu) {
    throw UsageError(fmt::format(
        "enable_reconfigure: the ranks of a group over the backend {} cannot change", names.cuda));
  }
  auto group = c10::make_intrusive<c10d::ProcessGroup>(request.store, request.rank, request.size);
  const std::string name = request.group_name;
  const std::vector<int> members = request.members;
  const std::string action = fmt::format("forming group {} over the backend {}", name, backends);
  const auto store_server = request.store_server;
  const auto check_peers = request.check_peers;
  translate(action.c_str(), [&] {
    const bool reconfigures = request.enable_reconfigure;  // then a group has one backend
    try {
      auto for_cuda = request_for_cuda(request);
      auto backend = kind.make(std::move(request));
      group->setBackend(c10::DeviceType::CPU, kind.type, backend);
      if (!reconfigures) add_cuda_backend(*group, names, backend, std::move(for_cuda));
    } catch (const c10::DistNetworkError&) {
      explain_lost_store(fmt::format("{}: {}", action, current_exception_text()),
                         *group->getStore(), store_server, check_peers);
    }
  });
  group->setDefaultBackend(kind.type);
  group->setGroupName(name);
  attach_flight_recorder(group, members);
  return group;
}

}  // namespace paceline::distributed
