#include "backends/hierarchical/backend.h"

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <utility>

#include <paceline/error.h>

#include "base/address.h"
#include "base/parse.h"
#include "distributed/store_calls.h"
#include "distributed/store_exchange.h"
#include "distributed/translate.h"
#include "internode/bucket_level.h"
#include "internode/connect_leaders.h"

namespace paceline::backends {
namespace {

using distributed::BackendRequest;

// This machine's address for the other nodes, where the rendezvous does not tell: of the interface
// that Gloo is to use; by its name, unless that means the loopback; or the only one that it has.
std::string find_host(const paceline::GlooOptions& gloo) {
  if (!gloo.hostnames.empty()) return gloo.hostnames.front();
  const char* const variable = std::getenv("GLOO_SOCKET_IFNAME");
  std::string interface = gloo.interfaces.empty() ? "" : gloo.interfaces.front();
  if (interface.empty() && variable != nullptr) interface = base::split_at_commas(variable).front();
  if (!interface.empty()) {
    for (const base::Address& one : base::addresses_in_network(interface)) return one.host();
  }
  std::string name = base::host_name();
  const auto found = base::addresses_in_network();
  try {
    if (!base::resolve(name, 0).front().is_loopback()) return name;
  } catch (const UsageError& error) {
    if (found.size() == 1) return found.front().host();
    throw UsageError(
        fmt::format("{}. The other machines reach this one by its name, unless init_method is "
                    "tcp:// or env://, or GLOO_SOCKET_IFNAME names an interface",
                    error.what()));
  }
  return found.size() == 1 ? found.front().host() : name;
}

// The same for some of its ranks, whose keys in the store are their own.
BackendRequest part_of(const BackendRequest& request, const std::vector<int>& ranks, int rank,
                       const std::string& prefix) {
  const shm::GlobalRanks global = request.global_ranks();
  BackendRequest part{.store = c10::make_intrusive<c10d::PrefixStore>(prefix, request.store),
                      .store_server = request.store_server,
                      .rank = rank,
                      .size = static_cast<int>(ranks.size()),
                      .timeout = request.timeout,
                      .group_name = request.group_name,
                      .options = request.options,
                      .host = request.host,
                      .check_peers = request.check_peers};
  for (const int one : ranks) {
    part.members.push_back(global.of(one));
    if (!global.nodes().empty()) {
      part.nodes.push_back(global.nodes()[static_cast<std::size_t>(one)]);
    }
  }
  return part;
}

std::unique_ptr<internode::Engine> connect_engine(const BackendRequest& request,
                                                  const paceline::PacelineOptions& options,
                                                  const std::string& purpose) {
  const bool known = distributed::is_backend_available(options.engine);
  const distributed::BackendKind* const kind =
      known ? &distributed::find_backend(options.engine) : nullptr;
  if (kind == nullptr || !kind->make_engine) {
    throw UsageError(
        fmt::format("PacelineOptions::engine '{}' cannot carry data between nodes in this build: "
                    "gloo can if it was made with Gloo's headers (libgloo-dev), mpi with an MPI",
                    options.engine));
  }
  BackendRequest engine{.store = c10::make_intrusive<c10d::PrefixStore>(purpose, request.store),
                        .store_server = request.store_server,
                        .rank = request.rank,
                        .size = request.size,
                        .timeout = request.timeout,
                        .group_name = fmt::format("{}, {}", request.group_name, purpose),
                        .members = request.members,
                        .nodes = request.nodes,
                        .host = request.host,
                        .mpi = request.mpi};
  if (options.engine == "gloo") engine.options = options.gloo;
  try {
    return kind->make_engine(engine);
  } catch (const c10::DistNetworkError&) {
    distributed::explain_lost_store("making an engine: " + distributed::current_exception_text(),
                                    *request.store, request.store_server, request.check_peers);
  }
}

BackendRequest leaders_of(const BackendRequest& request, const internode::NodeMap& map) {
  std::vector<int> leaders;
  for (int node = 0; node < map.nodes(); ++node) leaders.push_back(map.leader_of(node));
  return part_of(request, leaders, map.node(), "leaders");
}

// A rank of this node that is lost or late may only have learnt before this one that the store is
// lost, or wait for it. Throws then.
void check_store(const BackendRequest& request, const PeerError& error) {
  const auto server = request.store_server;
  const auto& ranks = error.ranks();
  if (server && std::ranges::find(ranks, *server) != ranks.end()) return;
  const auto ask = [store = request.store](const auto&) { return store->check({"any"}); };
  bool answers = false;
  try {
    answers =
        distributed::call_store(base::Deadline::after(std::chrono::seconds(1)), ask).has_value();
  } catch (const c10::DistNetworkError&) {
    distributed::explain_lost_store("forming the group: " + distributed::current_exception_text(),
                                    *request.store, server, request.check_peers);
  } catch (const std::exception&) {
    return;  // `error` is all that is known
  }
  if (answers || !server) return;
  throw Timeout(fmt::format("{}, which rank {} serves, does not answer; meanwhile {}",
                            distributed::describe_store(*request.store), *server, error.what()),
                {*server}, "connect", 0);
}

// If ranks of this node do not come, or are lost, all nodes learn it from its leader.
std::shared_ptr<shm::Region> form_local_region(const BackendRequest& request,
                                               const internode::NodeMap& map) {
  const auto report = [&](const shm::Failure& failure) {
    if (!map.is_leader()) return;
    const BackendRequest leading = leaders_of(request, map);
    distributed::StoreExchange exchange(leading);
    internode::report_to_leaders(exchange, failure);
  };
  try {
    return form_region(
        part_of(request, map.here(), map.local_rank(), fmt::format("node {}", map.node())));
  } catch (const PeerError& error) {
    check_store(request, error);
    report(shm::failure_of(error));
    throw;
  } catch (const std::exception& error) {
    report(internode::own_failure(request.global_ranks(), request.rank, error));
    throw;
  }
}

// If it fails, so does the region, whose other ranks wait for the leader.
internode::NodeLinks::Connections connect_leaders(const BackendRequest& request,
                                                  const internode::NodeMap& map,
                                                  shm::Region& region,
                                                  const base::Deadline& deadline) {
  const BackendRequest leading = leaders_of(request, map);
  distributed::StoreExchange exchange(leading);
  try {
    return internode::connect_leaders(exchange, map,
                                      {.group = request.group_name,
                                       .host = request.host,
                                       .ranks = request.global_ranks(),
                                       .check_peers =
                                           [&] {
                                             request.check_peers();
                                             region.check_peers({}, {"connect", 0});
                                           }},
                                      deadline);
  } catch (const PeerError& error) {
    region.fail(shm::failure_of(error), {"connect", 0});
  } catch (const std::exception& error) {
    region.abort(error.what());
    throw;
  }
}

}  // namespace

HierarchicalBackend::Parts connect_nodes(BackendRequest request) {
  const auto options = distributed::own_options<paceline::PacelineOptions>(request, "paceline");
  const auto deadline = base::Deadline::after(request.timeout + internode::kFormationGrace);
  if (request.host.empty()) request.host = find_host(options.gloo);
  const internode::NodeMap map(request.nodes.empty()
                                   ? std::vector<int>(static_cast<std::size_t>(request.size))
                                   : request.nodes,
                               request.rank);
  // They are there before any other rank uses its own.
  auto calls = connect_engine(request, options, "calls");
  auto between = connect_engine(request, options, "messages");
  auto region = form_local_region(request, map);
  internode::NodeLinks::Connections connections;
  if (map.is_leader()) connections = connect_leaders(request, map, *region, deadline);
  auto group = std::make_shared<internode::Group>(region, map, request.global_ranks(),
                                                  std::move(connections), std::move(calls));
  auto messages = std::make_shared<internode::RemoteMessages>(
      std::move(region), request.global_ranks(), request.rank, std::move(between));
  const auto shared = std::make_shared<const BackendRequest>(std::move(request));
  return {
      std::move(group), distributed::StoreBarrier(*shared), std::move(messages),
      [shared, options](const std::string& name) { return connect_engine(*shared, options, name); },
      shared};
}

namespace {

const bool hierarchical_registered = distributed::register_backend(
    "hierarchical",
    {.make = [](BackendRequest request) -> c10::intrusive_ptr<c10d::Backend> {
       return c10::make_intrusive<HierarchicalBackend>(connect_nodes(std::move(request)));
     },
     .type = c10d::ProcessGroup::BackendType::CUSTOM,
     .is_internal = true});

}  // namespace

HierarchicalBackend::HierarchicalBackend(Parts parts)
    : RemoteMessagesBackend(parts.group, {parts.group, &parts.group->local()},
                            std::move(parts.monitored_barrier), std::move(parts.messages)),
      nodes_(std::move(parts.group)),
      make_engine_(std::move(parts.make_engine)),
      request_(std::move(parts.request)) {}

void HierarchicalBackend::add_inherited(BackendRequest& part) const {
  part.store_server = request_->store_server;
  part.host = request_->host;
  part.mpi = request_->mpi;
  auto options = distributed::own_options<paceline::PacelineOptions>(*request_, "paceline");
  const auto given = distributed::own_options<paceline::PacelineOptions>(part, "paceline");
  options.staging_bytes = given.staging_bytes;
  options.single_copy_bytes = given.single_copy_bytes;
  part.options = options;
}

c10::intrusive_ptr<c10d::Backend> HierarchicalBackend::make_part(BackendRequest part) const {
  if (!part.spans_nodes()) return PacelineBackend::make_part(std::move(part));
  return c10::make_intrusive<HierarchicalBackend>(connect_nodes(std::move(part)));
}

// If a rank of another node is lost, the leader fails this region.
void HierarchicalBackend::check_peers(const std::vector<int>& needed, const shm::OpContext& op) {
  const internode::NodeMap& map = nodes_->map();
  const shm::GlobalRanks& global = nodes_->global_ranks();
  std::vector<int> local;
  shm::RankSet left;  // on other nodes
  for (const int rank : needed) {
    if (!is_remote(rank)) {
      local.push_back(map.local_rank_of(rank));
    } else if (region().has_left(global.of(rank))) {
      left.insert(global.of(rank));
    }
  }
  region().check_peers(local, op);
  if (!left.empty()) region().fail(internode::failure_of_left(global, left, op.operation), op);
}

// Its sums across nodes have a leaf for each rank, in the order of ranks; others are made by calls.
std::unique_ptr<distributed::BucketReducer> HierarchicalBackend::make_bucket_reducer(
    const distributed::BucketReducer::Options& options) {
  if (options.leaves && !options.leaves->is_rank_order()) return nullptr;
  return make_shm_bucket_reducer(options, [&] {
    nodes_->set_timeout(effective_timeout({}));
    return std::make_shared<internode::BucketLevel>(
        nodes_, make_engine_(fmt::format("buckets {}", ++bucket_reducers_)));
  });
}

bool HierarchicalBackend::is_remote(int rank) const {
  const internode::NodeMap& map = nodes_->map();
  return rank >= 0 && rank < map.size() && map.node_of(rank) != map.node();
}

HierarchicalBackend::WorkPtr HierarchicalBackend::send(Tensors& tensors, int to, int tag) {
  if (is_remote(to)) return remote_message(kSend, tensors, to, tag);
  return message(kSend, tensors, nodes_->map().local_rank_of(checked_peer(to)), tag);
}

HierarchicalBackend::WorkPtr HierarchicalBackend::recv(Tensors& tensors, int from, int tag) {
  if (is_remote(from)) return remote_message(kReceive, tensors, from, tag);
  return message(kReceive, tensors, nodes_->map().local_rank_of(checked_peer(from)), tag, from);
}

HierarchicalBackend::WorkPtr HierarchicalBackend::recvAnysource(Tensors& /*tensors*/, int /*tag*/) {
  throw UsageError(
      fmt::format("recv from any rank in group {}, which spans {} nodes: name the sender",
                  region().options().name, nodes_->map().nodes()));
}

}  // namespace paceline::backends
