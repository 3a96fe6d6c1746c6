#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>
#include <vector>

#include <paceline/distributed.h>

#include "base/environment.h"
#include "base/unique_fd.h"
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

// What options and environment say, checked, without touching anything.
struct Plan {
  enum class Means { given_store, alone, inherited, tcp, file };
  Means means = Means::alone;
  int rank = 0;
  int size = 1;
  std::string host;
  int port = 0;
  bool serve = false;  // this rank runs the store's server
  bool agent = false;  // the launcher does
  std::string path;
  bool launched = false;      // the ranks are the processes that a launcher started
  bool take_sockets = false;  // the inherited ones, which serve only once
};

// Throws UsageError naming the option or variable that is missing or makes no sense. `first` says
// that this is the process's first.
Plan plan_rendezvous(const InitOptions& options, const base::Environment& environment, bool first);

// Carries it out, within the options' timeout. Each process numbers its attempts alike, from 0.
// Throws Timeout if the store cannot be used in time; PeerLost if rank 0 was to serve it and has
// ended, of `processes`, the ranks' where they are known.
Rendezvous rendezvous(const Plan& plan, const InitOptions& options,
                      const base::Environment& environment, int attempt,
                      const shm::Membership* processes);

}  // namespace paceline::distributed
