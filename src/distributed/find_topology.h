#pragma once

#include <functional>

#include "base/environment.h"
#include "distributed/backend.h"
#include "distributed/rendezvous.h"
#include "distributed/topology.h"

namespace paceline::distributed {

struct FoundTopology {
  Topology topology;
  bool exchanged;  // whether all ranks have just told each other, in the store
};

// On which nodes the ranks run that meet in the request's store. They exchange what they know, but
// where the plan or the launcher says that there is one node. `check` may refuse what is found;
// rank 0 then stays until the others have found it too, as it may serve the store.
FoundTopology find_topology(const BackendRequest& request, const Plan& plan,
                            const base::Environment& environment,
                            const std::function<void(const Topology&)>& check);

}  // namespace paceline::distributed
