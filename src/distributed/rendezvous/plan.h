#pragma once

#include <string>

#include <paceline/distributed.h>

#include "base/environment.h"

namespace paceline::distributed {

// What options and environment say, after checks that have no effect outside.
struct Plan {
  enum class Means { given_store, alone, inherited, local, tcp, file };
  Means means = Means::alone;
  int rank = 0;
  int size = 1;
  std::string host;
  int port = 0;
  bool serve = false;  // this rank runs the store's server
  bool agent = false;  // the launcher does
  std::string path;
  std::string job{};              // by which the processes of this machine find each other
  std::string world{};            // its name in the store; empty: the attempt's number tells
  bool launched = false;          // the ranks are the processes that a launcher started
  bool several_machines = false;  // the launcher says that ranks are on others, too
  bool take_sockets = false;      // the inherited ones, which serve only once
};

// Throws UsageError naming the option or variable that is missing or invalid. `first`: whether this
// is the process's first rendezvous.
Plan plan_rendezvous(const InitOptions& options, const base::Environment& environment, bool first);

}  // namespace paceline::distributed
