#include "shm/membership/socket.h"

#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>

#include "base/errno_error.h"

namespace paceline::shm {
namespace {

constexpr std::size_t kMaxDescriptors = 253;

struct AbstractAddress {
  sockaddr_un address{};
  socklen_t length = 0;

  explicit AbstractAddress(const std::string& name) {
    address.sun_family = AF_UNIX;
    // The first byte stays zero: that is what makes the name abstract.
    const std::size_t size = std::min(name.size(), sizeof(address.sun_path) - 1);
    std::memcpy(address.sun_path + 1, name.data(), size);
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + size);
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
};

base::UniqueFd make_socket() {
  base::UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!socket) throw base::errno_error("cannot make a Unix socket");
  return socket;
}

bool same_user(int socket) {
  ucred peer{};
  socklen_t length = sizeof(peer);
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 &&
         peer.uid == ::geteuid();
}

void put_control(cmsghdr* header, int type, const void* data, std::size_t bytes) {
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = type;
  header->cmsg_len = CMSG_LEN(bytes);
  std::memcpy(CMSG_DATA(header), data, bytes);
}

void read_control(msghdr& message, Packet& packet) {
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET) continue;
    if (c->cmsg_type == SCM_RIGHTS) {
      const std::size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (std::size_t i = 0; i < count; ++i) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
        packet.fds.emplace_back(fd);
      }
    } else if (c->cmsg_type == SCM_CREDENTIALS) {
      ucred sender{};
      std::memcpy(&sender, CMSG_DATA(c), sizeof(sender));
      packet.pid = sender.pid;
    }
  }
}

}  // namespace

bool send_packet(int socket, const std::string& bytes, std::span<const int> fds,
                 const base::Deadline& deadline) {
  iovec part{const_cast<char*>(bytes.data()), bytes.size()};
  // Explicit credentials reach a receiver that asks for them only after they were sent.
  const ucred self{::getpid(), ::geteuid(), ::getegid()};
  std::vector<char> control(CMSG_SPACE(sizeof(self)) +
                            (fds.empty() ? 0 : CMSG_SPACE(fds.size_bytes())));
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* const credentials = CMSG_FIRSTHDR(&message);
  put_control(credentials, SCM_CREDENTIALS, &self, sizeof(self));
  if (!fds.empty()) {
    put_control(CMSG_NXTHDR(&message, credentials), SCM_RIGHTS, fds.data(), fds.size_bytes());
  }
  bool explicit_credentials = true;
  while (::sendmsg(socket, &message, MSG_NOSIGNAL) < 0) {
    if (errno == EPIPE || errno == ECONNRESET) return false;
    if (errno == EINVAL && explicit_credentials) {
      // In a user namespace where this user has no number. Then the kernel adds its own, or none.
      explicit_credentials = false;
      message.msg_control = fds.empty() ? nullptr : control.data() + CMSG_SPACE(sizeof(self));
      message.msg_controllen -= CMSG_SPACE(sizeof(self));
      continue;
    }
    if (errno == ETOOMANYREFS && !deadline.expired()) {
      ::poll(nullptr, 0, 1);
    } else if (errno != EINTR) {
      throw base::errno_error("cannot send on a Unix socket");
    }
  }
  return true;
}

Packet receive_packet(int socket, std::size_t max_bytes) {
  Packet packet;
  packet.bytes.resize(max_bytes);
  iovec part{packet.bytes.data(), packet.bytes.size()};
  std::vector<char> control(CMSG_SPACE(kMaxDescriptors * sizeof(int)) + CMSG_SPACE(sizeof(ucred)));
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t received = 0;
  while ((received = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC)) < 0) {
    // ECONNRESET comes once, if the other end closed without reading all; what it sent comes next.
    if (errno == EINTR || errno == ECONNRESET) continue;
    throw base::errno_error("cannot receive on a Unix socket");
  }
  packet.closed = received == 0;
  packet.bytes.resize(static_cast<std::size_t>(received));
  if (!packet.closed) read_control(message, packet);
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    throw base::errno_error("cannot receive descriptors over a Unix socket", EMFILE);
  }
  return packet;
}

void want_credentials(int socket) {
  const int on = 1;
  if (::setsockopt(socket, SOL_SOCKET, SO_PASSCRED, &on, sizeof(on)) != 0) {
    throw base::errno_error("cannot ask for credentials on a Unix socket");
  }
}

base::UniqueFd listen_abstract(const std::string& name) {
  base::UniqueFd socket = make_socket();
  const AbstractAddress address(name);
  if (::bind(socket.get(), address.get(), address.length) != 0 ||
      ::listen(socket.get(), 4096) != 0) {
    throw base::errno_error("cannot listen on the abstract Unix socket " + name);
  }
  return socket;
}

base::UniqueFd connect_abstract(const std::string& name) {
  base::UniqueFd socket = make_socket();
  const AbstractAddress address(name);
  if (::connect(socket.get(), address.get(), address.length) != 0) {
    if (errno == ECONNREFUSED) return {};
    throw base::errno_error("cannot connect to the abstract Unix socket " + name);
  }
  if (!same_user(socket.get())) {
    throw Error("the abstract Unix socket " + name + " belongs to another user");
  }
  return socket;
}

base::UniqueFd accept_from_same_user(int listener) {
  base::UniqueFd socket(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
  if (!socket && errno != ECONNABORTED && errno != EINTR) {
    throw base::errno_error("cannot accept on a Unix socket");
  }
  if (socket && !same_user(socket.get())) socket.reset();
  return socket;
}

std::vector<bool> wait_readable(std::span<const int> fds, const base::Deadline& deadline) {
  std::vector<pollfd> polls;
  for (const int fd : fds) polls.push_back({fd, POLLIN, 0});
  int ready = 0;
  do {
    const auto left = std::min<std::chrono::milliseconds::rep>(deadline.remaining().count(),
                                                               std::numeric_limits<int>::max());
    ready = ::poll(polls.data(), polls.size(), static_cast<int>(left));
    if (ready < 0 && errno != EINTR) throw base::errno_error("cannot poll");
  } while (ready < 0);
  std::vector<bool> result;
  for (const pollfd& one : polls) result.push_back(one.revents != 0);
  return result;
}

bool has_unread_packets(int socket) {
  int bytes = 0;
  return ::ioctl(socket, SIOCOUTQ, &bytes) == 0 && bytes > 0;
}

bool has_hung_up(int socket) {
  pollfd one{socket, 0, 0};
  return ::poll(&one, 1, 0) > 0 && (one.revents & (POLLHUP | POLLERR)) != 0;
}

bool has_news(int fd) {
  pollfd one{fd, POLLIN, 0};
  return ::poll(&one, 1, 0) > 0;
}

}  // namespace paceline::shm
