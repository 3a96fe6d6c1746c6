#pragma once

#include <paceline/communicator.h>
#include <paceline/distributed.h>

#include <functional>

#include "distributed/rendezvous/plan.h"

namespace paceline::distributed {

// The rendezvous of a communicator's ranks: rank 0 chooses it, serves it and broadcasts it. Calls
// `check` before, and throws what it throws, or UsageError for options that contradict the
// communicator, but only after the broadcast, for which the other ranks wait. All ranks throw what
// rank 0 throws.
Plan plan_communicator(const Communicator& communicator, const InitOptions& options,
                       const std::function<void()>& check);

}  // namespace paceline::distributed
