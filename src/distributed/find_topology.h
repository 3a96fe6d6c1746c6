#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/environment.h"
#include "distributed/backend.h"
#include "distributed/rendezvous/plan.h"
#include "distributed/topology.h"

namespace paceline::distributed {

struct FoundTopology {
  Topology topology;
  bool exchanged;  // whether all ranks have just exchanged it in the store
};

// Finds the nodes of the ranks that meet in the request's store: they exchange what they know, on
// all ranks or on none, as `paceline run` starts ranks of one node. `check` may refuse the
// topology; rank 0, which may serve the store, then stays until the other ranks have read it.
// Throws UsageError if they name different backends.
FoundTopology find_topology(const BackendRequest& request, const std::string& backend,
                            const Plan& plan, const base::Environment& environment,
                            const std::function<void(const Topology&)>& check);

// The ranks of the request exchange their placements, and each returns what `make` makes of them.
// `make` throws on all ranks or on none.
Topology exchange_placements(const BackendRequest& request, const std::string& backend,
                             const Placement& own,
                             const std::function<Topology(std::vector<Placement>)>& make);

}  // namespace paceline::distributed
