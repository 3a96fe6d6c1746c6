#pragma once

#include <poll.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/deadline.h"
#include "base/pending_text.h"
#include "base/unique_fd.h"
#include "net/close_on_fork_fd.h"
#include "net/secure_channel.h"

namespace paceline::net {

// Messages to and from a process on another machine, over a connected stream socket. No call waits.
//
// TCP's own probes detect that the other machine is gone or cannot be reached, within
// kSilenceLimit; a process that is stopped or busy does not count as lost. A forked child can only
// destroy it.
class Connection {
 public:
  static constexpr std::chrono::seconds kSilenceLimit{8};

  // `owner`: what has the other end, for messages: "launcher". Throws Error.
  Connection(base::UniqueFd socket, const Key& key, SecureChannel::Side side, std::string owner);

  // Adds what receive() waits for.
  void add_to(std::vector<pollfd>& fds) const;
  // Messages that have arrived. Also sends what the socket takes now.
  std::vector<std::string> receive();
  // Queues the message, and sends what the socket takes now.
  void send(std::string_view message);

  struct Loss {
    std::string why;                          // about the other end: "it closed the connection"
    base::Deadline::Clock::time_point since;  // when it happened at the earliest
    bool silent = false;                      // the other machine does not answer
    bool wrong_key = false;                   // the other end does not know the key
  };
  // Set if nothing arrives any more.
  const std::optional<Loss>& loss() const { return loss_; }
  // The other end has answered as a channel does.
  bool greeted() const { return channel_.greeted(); }
  // The other end knows the key.
  bool authenticated() const { return channel_.authenticated(); }
  // Something is left to send.
  bool pending() const { return !loss_ && !output_.empty(); }
  const base::Deadline::Clock::time_point& began() const { return began_; }

 private:
  void write_some();
  std::string read_some();
  void lose_silent();
  void lose(std::string why, std::chrono::seconds ago = {});

  CloseOnForkFd socket_;
  SecureChannel channel_;
  std::string owner_;
  base::PendingText output_;
  std::optional<Loss> loss_;
  base::Deadline::Clock::time_point began_ = base::Deadline::Clock::now();
};

}  // namespace paceline::net
