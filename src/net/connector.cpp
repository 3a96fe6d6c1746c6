#include "net/connector.h"

#include <fmt/format.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "base/errno_error.h"

namespace paceline::net {
namespace {

using namespace std::chrono_literals;

constexpr auto kAttemptLimit = 5s;
constexpr auto kPause = 200ms;

}  // namespace

Connector::Connector(std::string host, int port, std::chrono::milliseconds pause)
    : host_(std::move(host)), port_(port), next_(base::Deadline::after(pause)) {}

void Connector::add_to(std::vector<pollfd>& fds) const {
  if (socket_) fds.push_back({socket_.get(), POLLOUT, 0});
}

std::optional<base::UniqueFd> Connector::advance() {
  if (!socket_) {
    if (!next_.expired()) return std::nullopt;
    start();
  }
  if (!socket_) return std::nullopt;
  pollfd ready{socket_.get(), POLLOUT, 0};
  if (::poll(&ready, 1, 0) <= 0) {
    if (next_.expired()) fail(fmt::format("{}: no answer", target_));
    return std::nullopt;
  }
  int code = 0;
  socklen_t size = sizeof(code);
  ::getsockopt(socket_.get(), SOL_SOCKET, SO_ERROR, &code, &size);
  // While nobody listens there, TCP may connect a socket to itself, if the port is one that the
  // system gives to sockets.
  if (code == 0 && base::local_address(socket_.get()).to_string() == target_) code = ECONNREFUSED;
  if (code == 0) {
    next_ = base::Deadline::after(base::Deadline::kLongest);
    return std::move(socket_);
  }
  fail(base::errno_error(target_, code).what());
  return std::nullopt;
}

void Connector::start() {
  try {
    if (addresses_.empty()) {
      addresses_ = base::resolve(host_, port_);
      std::ranges::reverse(addresses_);
    }
    const base::Address address = addresses_.back();
    addresses_.pop_back();
    target_ = address.to_string();
    next_ = base::Deadline::after(kAttemptLimit);
    socket_ =
        base::UniqueFd(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket_) throw base::errno_error(target_);
    if (::connect(socket_.get(), address.data(), address.size()) != 0 && errno != EINPROGRESS) {
      throw base::errno_error(target_);
    }
  } catch (const Error& error) {
    fail(error.what());
  }
}

void Connector::fail(std::string why) {
  socket_.reset();
  last_failure_ = std::move(why);
  // Another address of the host is tried at once.
  next_ = base::Deadline::after(addresses_.empty() ? kPause : 0ms);
}

}  // namespace paceline::net
