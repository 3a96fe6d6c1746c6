#include "launch/inherited_fds.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <string>

#include "base/errno_error.h"

namespace paceline::launch {
InheritedFds make_inherited_fds(int ranks, bool connected) {
  InheritedFds result;
  result.bootstrap_sockets.resize(static_cast<std::size_t>(ranks));
  for (std::size_t rank = 1; connected && rank < result.bootstrap_sockets.size(); ++rank) {
    std::array<int, 2> ends{};
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0) {
      throw base::errno_error("cannot create the bootstrap sockets of two ranks");
    }
    result.bootstrap_sockets[0].emplace_back(ends[0]);
    result.bootstrap_sockets[rank].emplace_back(ends[1]);
  }
  result.store = base::UniqueFd(::memfd_create("paceline-store", MFD_CLOEXEC));
  if (!result.store) throw base::errno_error("cannot create the ranks' shared file");
  return result;
}

int find_free_port() {
  const base::UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  if (!fd || ::bind(fd.get(), generic, size) != 0 || ::getsockname(fd.get(), generic, &size) != 0) {
    throw base::errno_error("cannot find a free port on 127.0.0.1 for MASTER_PORT");
  }
  return ntohs(address.sin_port);
}

}  // namespace paceline::launch
