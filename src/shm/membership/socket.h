#pragma once

#include <sys/types.h>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/unique_fd.h"

namespace paceline::shm {

// Unix seqpacket sockets: whole messages, descriptors, and the sender's process id vouched for by
// the kernel.

struct Packet {
  std::string bytes;
  std::vector<base::UniqueFd> fds;
  pid_t pid = 0;  // of the sender; 0 where it lives in a process namespace not visible from here
  bool closed = false;  // the other end is gone; the rest is empty
};

// Does not block, since a seqpacket socket takes the few small messages sent here at once.
// Descriptors are the exception: a user may have no more of them on their way than a process may
// have open. Then this tries again until the deadline. Returns false if the other end is gone.
bool send_packet(int socket, const std::string& bytes, std::span<const int> fds,
                 const base::Deadline& deadline);

// Call it when poll() says so. At most `max_bytes` and 253 descriptors (the
// kernel's limit).
Packet receive_packet(int socket, std::size_t max_bytes);

// Asks the kernel to put the sender's credentials on every packet received.
void want_credentials(int socket);

// A listening socket in the abstract namespace; the kernel always removes its name.
base::UniqueFd listen_abstract(const std::string& name);
// Empty if no process listens there.
base::UniqueFd connect_abstract(const std::string& name);
// Accepts one waiting connection; empty if it was from another user (it is dropped) or went away.
base::UniqueFd accept_from_same_user(int listener);

// poll() for input on all of `fds` (-1 entries are skipped) until the deadline; returns which are
// ready, none when it expired.
std::vector<bool> wait_readable(std::span<const int> fds, const base::Deadline& deadline);
inline bool wait_readable(int fd, const base::Deadline& deadline) {
  return wait_readable(std::span(&fd, 1), deadline).front();
}
// Whether the other end has not received all that was sent here.
bool has_unread_packets(int socket);
// Whether something can be read, or the other end is gone.
bool has_news(int fd);
// Whether the other end is gone, whatever it has sent before.
bool has_hung_up(int socket);

}  // namespace paceline::shm
