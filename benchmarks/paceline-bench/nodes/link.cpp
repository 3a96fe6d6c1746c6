#include "nodes/link.h"

#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/error.h>

#include "base/address.h"
#include "base/errno_error.h"
#include "base/unique_fd.h"
#include "nodes/network.h"

namespace paceline::bench {
namespace {

constexpr const char* kFailure = "cannot measure the link between the nodes";

base::UniqueFd check(int fd) {
  if (fd < 0) throw base::errno_error(kFailure);
  return base::UniqueFd(fd);
}

// To the next node, and from the one before.
class Connections {
 public:
  explicit Connections(int nodes) {
    const int ranks_of_each = get_world_size() / nodes;
    const bool leads = get_rank() % ranks_of_each == 0;
    base::UniqueFd listener;
    std::string own;
    if (leads) {
      listener = check(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      if (::listen(listener.get(), 1) != 0) throw base::errno_error(kFailure);
      own = std::to_string(base::local_address(listener.get()).port());
    }
    const auto ports = all_gather_bytes(own);
    if (!leads) return;
    const int next = (get_rank() / ranks_of_each + 1) % nodes;
    const auto leader = static_cast<std::size_t>(next) * static_cast<std::size_t>(ranks_of_each);
    const int port = std::stoi(ports[leader]);
    next_ = check(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const base::Address address = base::resolve(node_address(next), port).front();
    if (::connect(next_.get(), address.data(), address.size()) != 0) {
      throw base::errno_error(kFailure);
    }
    before_ = check(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  }

  void exchange(std::vector<char>& sent, std::vector<char>& received) {
    if (!next_) return;
    std::size_t to_send = sent.size();
    std::size_t to_receive = received.size();
    while (to_send > 0 || to_receive > 0) {
      // poll() skips descriptors below 0.
      std::array<pollfd, 2> fds{pollfd{to_send > 0 ? next_.get() : -1, POLLOUT, 0},
                                pollfd{to_receive > 0 ? before_.get() : -1, POLLIN, 0}};
      if (::poll(fds.data(), fds.size(), -1) < 0 && errno != EINTR)
        throw base::errno_error(kFailure);
      if (fds[0].revents != 0) {
        to_send -= moved(::send(next_.get(), sent.data() + (sent.size() - to_send), to_send,
                                MSG_DONTWAIT | MSG_NOSIGNAL));
      }
      if (fds[1].revents != 0) {
        to_receive -= moved(::recv(before_.get(), received.data() + (received.size() - to_receive),
                                   to_receive, MSG_DONTWAIT));
      }
    }
  }

 private:
  static std::size_t moved(ssize_t bytes) {
    if (bytes > 0) return static_cast<std::size_t>(bytes);
    if (bytes == 0) throw Error(fmt::format("{}: a rank has ended", kFailure));
    if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    throw base::errno_error(kFailure);
  }

  base::UniqueFd next_;
  base::UniqueFd before_;
};

}  // namespace

Contender link(int nodes, std::int64_t bytes) {
  const auto moved = static_cast<std::size_t>(2 * bytes * (nodes - 1) / nodes);
  struct State {
    Connections connections;
    std::vector<char> sent;
    std::vector<char> received;
  };
  const auto state = std::make_shared<State>(
      State{Connections(nodes), std::vector<char>(moved), std::vector<char>(moved)});
  return {.implementation = "link", .variant = "", .prepare = {}, .run = [state] {
            state->connections.exchange(state->sent, state->received);
          }};
}

}  // namespace paceline::bench
