#pragma once

#include <poll.h>

#include <optional>
#include <string>
#include <vector>

#include "base/address.h"
#include "base/deadline.h"
#include "base/unique_fd.h"

namespace paceline::net {

// Connects to a host that may not listen yet, may be unreachable for now or may have no address
// yet: tries its addresses in turn, again and again. No call waits, except for name servers.
class Connector {
 public:
  // `pause`: before the first attempt.
  Connector(std::string host, int port, std::chrono::milliseconds pause = {});

  void add_to(std::vector<pollfd>& fds) const;
  // When to call advance() at the latest.
  const base::Deadline& deadline() const { return next_; }
  // Goes on; returns the connected socket once there is one. Nothing is left to do then.
  std::optional<base::UniqueFd> advance();
  // Why the last attempt failed: "10.0.0.1:29500: Connection refused (ECONNREFUSED)". Empty before.
  const std::string& last_failure() const { return last_failure_; }

 private:
  void start();
  void fail(std::string why);

  std::string host_;
  int port_;
  std::vector<base::Address> addresses_;  // those to be tried, the next one last
  base::UniqueFd socket_;                 // while an attempt is under way
  std::string target_;
  std::string last_failure_;
  base::Deadline next_;  // of the attempt under way, or of the pause before the next one
};

}  // namespace paceline::net
