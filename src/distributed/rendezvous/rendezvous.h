#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <paceline/distributed.h>

#include "base/environment.h"
#include "base/unique_fd.h"
#include "distributed/rendezvous/agent_round.h"
#include "distributed/rendezvous/plan.h"
#include "shm/membership/bootstrap.h"

namespace paceline::distributed {

// Who this process is and how it reaches the others.
struct Rendezvous {
  int rank = 0;
  int size = 1;
  c10::intrusive_ptr<c10d::Store> store{};  // its keys are this attempt's own
  // Keep it until all ranks have met in the store; null if the store needs none.
  std::shared_ptr<const AgentRound> round{};
  // The rest: see BackendRequest.
  std::optional<int> store_server{};
  std::vector<base::UniqueFd> sockets{};
  std::string host{};
};

// Carries out the plan within the options' timeout. All processes number their attempts alike, from
// 0. `processes`: the ranks' processes, if they are known. Throws Timeout if the store cannot be
// used in time; PeerLost if rank 0 should serve the store and has ended.
Rendezvous rendezvous(const Plan& plan, const InitOptions& options,
                      const base::Environment& environment, int attempt,
                      const shm::Membership* processes);

}  // namespace paceline::distributed
