#include "net/connection.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <utility>

#include "base/errno_error.h"

namespace paceline::net {
namespace {

// Other kinds of sockets do not have these; they need none.
void watch_other_end(int socket) {
  constexpr int kInterval = 2;
  constexpr auto kLimit = static_cast<int>(Connection::kSilenceLimit.count());
  const auto set = [&](int level, int option, int value) {
    ::setsockopt(socket, level, option, &value, sizeof(value));
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, kInterval);
  set(IPPROTO_TCP, TCP_KEEPINTVL, kInterval);
  set(IPPROTO_TCP, TCP_KEEPCNT, kLimit / kInterval - 1);
  // Also for data that nobody acknowledges.
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, kLimit * 1000);
}

bool is_silence(int code) {
  return code == ETIMEDOUT || code == EHOSTUNREACH || code == ENETUNREACH;
}

}  // namespace

Connection::Connection(base::UniqueFd socket, const Key& key, SecureChannel::Side side,
                       std::string owner)
    : socket_(std::move(socket)), channel_(key, side), owner_(std::move(owner)) {
  if (::fcntl(socket_.get(), F_SETFL, O_NONBLOCK) != 0) {
    throw base::errno_error("cannot make a socket non-blocking");
  }
  watch_other_end(socket_.get());
  write_some();
}

void Connection::add_to(std::vector<pollfd>& fds) const {
  if (loss_) return;
  fds.push_back({socket_.get(), static_cast<short>(pending() ? POLLIN | POLLOUT : POLLIN), 0});
}

void Connection::send(std::string_view message) {
  channel_.send(message);
  write_some();
}

std::vector<std::string> Connection::receive() {
  std::vector<std::string> messages;
  try {
    while (!loss_) {
      const std::string bytes = read_some();
      if (bytes.empty()) break;
      for (std::string& message : channel_.receive(bytes)) messages.push_back(std::move(message));
    }
  } catch (const ChannelError& error) {
    lose(error.what());
    loss_->wrong_key = dynamic_cast<const WrongKeyError*>(&error) != nullptr;
  }
  write_some();
  return messages;
}

// Empty if there is nothing now.
std::string Connection::read_some() {
  std::array<char, 65536> buffer;
  const ssize_t size = ::recv(socket_.get(), buffer.data(), buffer.size(), 0);
  if (size > 0) return {buffer.data(), static_cast<std::size_t>(size)};
  if (size == 0 || errno == ECONNRESET) {
    lose(fmt::format("it closed the connection, so its {} has ended", owner_));
  } else if (is_silence(errno)) {
    lose_silent();
  } else if (errno != EAGAIN && errno != EINTR) {
    lose(base::errno_error("the connection failed").what());
  }
  return {};
}

void Connection::write_some() {
  output_.append(channel_.take_output());
  while (pending()) {
    const std::string_view rest = output_.rest();
    const ssize_t size = ::send(socket_.get(), rest.data(), rest.size(), MSG_NOSIGNAL);
    if (size >= 0) {
      output_.remove_prefix(static_cast<std::size_t>(size));
    } else if (errno == EAGAIN) {
      return;
    } else if (is_silence(errno)) {
      return lose_silent();
    } else if (errno != EINTR) {
      // What has arrived before is still read.
      output_.clear();
      return;
    }
  }
}

void Connection::lose_silent() {
  lose(fmt::format("its machine has not answered for {} s", kSilenceLimit.count()), kSilenceLimit);
  loss_->silent = true;
}

void Connection::lose(std::string why, std::chrono::seconds ago) {
  loss_ = Loss{std::move(why), base::Deadline::Clock::now() - ago};
  socket_.reset();
}

}  // namespace paceline::net
