#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>
#include <vector>

#include <paceline/distributed.h>

#include "base/environment.h"
#include "base/unique_fd.h"
#include "distributed/rendezvous/plan.h"
#include "shm/membership/bootstrap.h"

namespace paceline::distributed {

// Who this process is and how it reaches the others.
struct Rendezvous {
  int rank = 0;
  int size = 1;
  c10::intrusive_ptr<c10d::Store> store;  // its keys are this attempt's own
  std::vector<base::UniqueFd> sockets;    // see BackendRequest
  std::string host;                       // see BackendRequest
};

// Carries the plan out, within the options' timeout. Each process numbers its attempts alike, from
// 0. Throws Timeout if the store cannot be used in time; PeerLost if rank 0 was to serve it and has
// ended, of `processes`, the ranks' where they are known.
Rendezvous rendezvous(const Plan& plan, const InitOptions& options,
                      const base::Environment& environment, int attempt,
                      const shm::Membership* processes);

}  // namespace paceline::distributed
