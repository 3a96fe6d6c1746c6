#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>
#include <vector>

#include <paceline/distributed.h>

#include "base/environment.h"
#include "base/unique_fd.h"

namespace paceline::distributed {

// Who this process is and how it reaches the others.
struct Rendezvous {
  int rank = 0;
  int size = 1;
  c10::intrusive_ptr<c10d::Store> store;
  std::vector<base::UniqueFd> links;  // see BackendRequest
  std::string host;                   // see BackendRequest
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
  std::string path;
};

// Throws UsageError naming the option or variable that is missing or makes no sense.
Plan plan_rendezvous(const InitOptions& options, const base::Environment& environment);

// Carries it out. `first` says that this is the process's first: inherited links serve only once.
Rendezvous rendezvous(const Plan& plan, const InitOptions& options,
                      const base::Environment& environment, bool first);

}  // namespace paceline::distributed
