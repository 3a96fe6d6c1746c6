#pragma once

#include <sys/socket.h>

#include <array>

#include "base/errno_error.h"
#include "base/unique_fd.h"

namespace paceline::test {

// The two ends of a bootstrap socket between a rank and rank 0.
struct BootstrapSocketPair {
  base::UniqueFd first;
  base::UniqueFd second;
};

inline BootstrapSocketPair make_bootstrap_sockets() {
  std::array<int, 2> fds{};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds.data()) != 0) {
    throw base::errno_error("socketpair");
  }
  return {base::UniqueFd(fds[0]), base::UniqueFd(fds[1])};
}

}  // namespace paceline::test
