#pragma once

#include <optional>
#include <vector>

#include "base/unique_fd.h"

namespace paceline::launch {

// CPUs that no other job of this machine gets while this lives.
//
// Each is held by an abstract Unix socket that bears its number. The kernel frees the name when the
// last process that has the socket ends, however it ends; the socket is closed on exec. Names are
// those of a network namespace: jobs in different containers do not see each other's.
class HeldCpus {
 public:
  // Holds all of `cpus`. nullopt if one of them is held, or cannot be.
  static std::optional<HeldCpus> try_hold(const std::vector<int>& cpus);

 private:
  std::vector<base::UniqueFd> sockets_;
};

// Those of `cpus` that are not held at the moment, as far as the kernel's list of sockets shows.
std::vector<int> find_free(const std::vector<int>& cpus);

}  // namespace paceline::launch
