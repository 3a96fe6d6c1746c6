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
  bool one_machine = false;       // it says that they are all on this one
  bool take_sockets = false;      // the inherited ones, which serve only once
};

// Throws UsageError naming the option or variable that is missing or invalid. `has_sockets`: the
// inherited ones were not taken yet.
Plan plan_rendezvous(const InitOptions& options, const base::Environment& environment,
                     bool has_sockets);

// Where the plan's keys are, as all ranks call it: attempts are counted for each of these, since
// processes may have met others, or nobody, elsewhere before.
std::string place_of_keys(const Plan& plan);
inline constexpr const char* kInheritedKeys = "inherited";

}  // namespace paceline::distributed
