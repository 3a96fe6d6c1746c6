#include "net/listener.h"

#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>

#include "base/errno_error.h"

namespace paceline::net {
namespace {

base::UniqueFd bind_to(const base::Address& address) {
  base::UniqueFd socket(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;
  if (!socket || ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
      ::bind(socket.get(), address.data(), address.size()) != 0) {
    throw base::errno_error(fmt::format("cannot use the address {}", address.to_string()));
  }
  return socket;
}

base::UniqueFd listen_at(const base::Address& address) {
  base::UniqueFd socket = bind_to(address);
  if (::listen(socket.get(), 1024) == 0) return socket;
  throw base::errno_error(fmt::format("cannot listen at {}", address.to_string()));
}

}  // namespace

Listener::Listener(const base::Address& address)
    : socket_(listen_at(address)), address_(base::local_address(socket_.get())) {}

std::optional<base::UniqueFd> Listener::accept() {
  base::UniqueFd socket(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  return socket ? std::optional(std::move(socket)) : std::nullopt;
}

PortReservation::PortReservation(const base::Address& address)
    : socket_(bind_to(address.with_port(0))), port_(base::local_address(socket_.get()).port()) {}

}  // namespace paceline::net
