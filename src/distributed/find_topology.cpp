#include "distributed/find_topology.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <paceline/error.h>

#include <algorithm>
#include <map>
#include <vector>

#include "base/deadline.h"
#include "distributed/store_exchange.h"
#include "shm/membership/rank_set.h"

namespace paceline::distributed {

using shm::describe_ranks;
using shm::RankSet;

namespace {

// The place of this rank in a world that `paceline run` started on one node. All ranks with
// --virtual-local-rank have LOCAL_RANK=0.
Topology launched_topology(const Plan& plan, const base::Environment& environment) {
  const int node = environment.node_rank.value_or(0);
  const int local_rank = environment.local_rank.value_or(plan.rank);
  const int local_size = environment.local_world_size.value_or(plan.size);
  if (node == 0 && local_size == plan.size) {
    if (local_rank == plan.rank) return Topology::one_node(plan.size);
    if (local_rank == 0) return Topology::one_node_of_virtual_ranks(plan.size);
  }
  throw UsageError(fmt::format(
      "rank {} of {} has GROUP_RANK={}, LOCAL_RANK={}, LOCAL_WORLD_SIZE={}, which do not go "
      "together: `paceline run` gives a rank of a job on one node GROUP_RANK=0, LOCAL_RANK=RANK "
      "and LOCAL_WORLD_SIZE=WORLD_SIZE; leave these variables as they are",
      plan.rank, plan.size, node, local_rank, local_size));
}

std::vector<Placement> decode_placements(const std::vector<std::string>& blobs) {
  std::vector<Placement> placements;
  for (const std::string& blob : blobs) {
    auto placement = Placement::decode(blob);
    if (!placement) {
      throw Error(
          fmt::format("rank {} did not say on which node it runs: malformed record in the "
                      "store. Do all ranks use the same version of Paceline?",
                      placements.size()));
    }
    placements.push_back(std::move(*placement));
  }
  return placements;
}

// Takes each rank's backend from its blob, where it is the first line.
void check_backends(std::vector<std::string>& blobs) {
  std::map<std::string, RankSet> ranks;
  for (std::size_t rank = 0; rank < blobs.size(); ++rank) {
    std::string& blob = blobs[rank];
    const std::size_t end = std::min(blob.find('\n'), blob.size());
    ranks[blob.substr(0, end)].insert(static_cast<int>(rank));
    blob.erase(0, end + 1);
  }
  if (ranks.size() == 1) return;
  std::vector<std::string> texts;
  for (const auto& [backend, its] : ranks) {
    texts.push_back(fmt::format("{} {}", describe_ranks(its), backend));
  }
  throw UsageError(
      fmt::format("the ranks of the world have different backends: {}", fmt::join(texts, ", ")));
}

}  // namespace

Topology exchange_placements(const BackendRequest& request, const std::string& backend,
                             const Placement& own,
                             const std::function<Topology(std::vector<Placement>)>& make) {
  const auto deadline = base::Deadline::after(request.timeout);
  StoreExchange exchange(request);
  auto blobs = exchange.all_gather(backend + '\n' + own.encode(), deadline);
  try {
    check_backends(blobs);
    return make(decode_placements(blobs));
  } catch (const Error&) {
    exchange.let_others_read();
    throw;
  }
}

FoundTopology find_topology(const BackendRequest& request, const std::string& backend,
                            const Plan& plan, const base::Environment& environment,
                            const std::function<void(const Topology&)>& check) {
  if (plan.size == 1) return {Topology::one_node(1), false};
  if (plan.means == Plan::Means::inherited) {
    return {plan.launched ? launched_topology(plan, environment) : Topology::one_node(plan.size),
            false};
  }
  const auto make = [&](const std::vector<Placement>& placements) {
    Topology topology(placements);
    check(topology);
    return topology;
  };
  const auto own = Placement::own(environment, plan.launched);
  return {exchange_placements(request, backend, own, make), true};
}

}  // namespace paceline::distributed
