#pragma once

#include <vector>

#include "base/unique_fd.h"

namespace paceline::launch {

// The descriptors that the workers of a job inherit, all closed on exec until a worker claims its
// own. The creating process has to close them after the workers have started: a socket hangs up
// when the last copy of its other end is gone.
struct InheritedFds {
  std::vector<std::vector<base::UniqueFd>>
      bootstrap_sockets;  // of each rank, as PACELINE_BOOTSTRAP_SOCKETS describes
  base::UniqueFd store;   // an empty memfd
};

// `connected`: with sockets, which serve once; else each rank has none. Throws Error.
InheritedFds make_inherited_fds(int ranks, bool connected = true);

// A TCP port of 127.0.0.1 that is free at the moment. Throws Error.
int find_free_port();

}  // namespace paceline::launch
