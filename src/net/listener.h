#pragma once

#include <optional>

#include "base/address.h"
#include "base/unique_fd.h"

namespace paceline::net {

// A TCP socket that accepts connections to one address.
class Listener {
 public:
  // Port 0: one that is free. Throws Error.
  explicit Listener(const base::Address& address);

  int fd() const { return socket_.get(); }
  const base::Address& address() const { return address_; }
  // A connection that waits to be accepted; nullopt if there is none.
  std::optional<base::UniqueFd> accept();

 private:
  base::UniqueFd socket_;
  base::Address address_;
};

// A port that no other program gets by chance while this lives: it is bound, but does not listen.
// A server that sets SO_REUSEADDR, as those of PyTorch do, may bind it meanwhile.
class PortReservation {
 public:
  // Throws Error.
  explicit PortReservation(const base::Address& address);
  int port() const { return port_; }

 private:
  base::UniqueFd socket_;
  int port_;
};

}  // namespace paceline::net
