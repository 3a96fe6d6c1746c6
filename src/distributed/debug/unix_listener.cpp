#include "distributed/debug/unix_listener.h"

#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <functional>

#include <paceline/error.h>

#include "base/errno_error.h"
#include "distributed/debug/http_server.h"

namespace paceline::distributed {
namespace {

using base::UniqueFd;

sockaddr_un address_of(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    throw UsageError(
        fmt::format("the debug server's socket has a path of {} bytes: up to {} are allowed",
                    path.size(), sizeof(address.sun_path) - 1));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

UniqueFd unix_socket() {
  return UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

bool bind_socket(const UniqueFd& socket, const sockaddr_un& address) {
  return ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
}

// One process at a time may start a server at `path`: a socket at which another one is about to
// listen looks like one that was left. The claim is a name in the kernel and ends with its process.
UniqueFd claim(const std::string& path) {
  const auto absolute = std::filesystem::absolute(path).lexically_normal().string();
  const auto name = fmt::format("paceline-debug-server-{:x}", std::hash<std::string>()(absolute));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(&address.sun_path[1], name.data(), name.size());
  UniqueFd claimed = unix_socket();
  if (!bind_socket(claimed, address)) claimed.reset();
  return claimed;
}

// A server that was killed leaves its socket.
bool is_left(const sockaddr_un& address) {
  struct stat status {};
  if (::lstat(&address.sun_path[0], &status) != 0 || !S_ISSOCK(status.st_mode)) return false;
  const UniqueFd client = unix_socket();
  return ::connect(client.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) !=
             0 &&
         errno == ECONNREFUSED;
}

bool bind_at(const UniqueFd& socket, const sockaddr_un& address) {
  if (bind_socket(socket, address)) return true;
  if (errno != EADDRINUSE) return false;
  if (is_left(address) && ::unlink(&address.sun_path[0]) == 0) return bind_socket(socket, address);
  errno = EADDRINUSE;
  return false;
}

}  // namespace

UniqueFd listen_at_path(const std::string& path) {
  const auto error = [&] {
    const char* const advice =
        errno == EADDRINUSE ? "; each process, such as a rank, needs a path of its own" : "";
    return Error(
        base::errno_error(fmt::format("the debug server cannot listen at {}", path)).what() +
        std::string(advice));
  };
  const sockaddr_un address = address_of(path);
  const UniqueFd claimed = claim(path);
  if (!claimed) throw error();
  UniqueFd socket = unix_socket();
  // Linux gives the file the mode of the socket, so nobody else can connect in between.
  if (!socket || ::fchmod(socket.get(), S_IRUSR | S_IWUSR) != 0 || !bind_at(socket, address)) {
    throw error();
  }
  if (::listen(socket.get(), kBacklog) != 0) {
    const Error refused = error();
    ::unlink(path.c_str());
    throw refused;
  }
  return socket;
}

}  // namespace paceline::distributed
