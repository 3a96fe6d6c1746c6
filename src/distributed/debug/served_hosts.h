#pragma once

#include <set>
#include <string>
#include <string_view>

#include "base/address.h"

namespace paceline::distributed {

// The names and addresses under which a client may ask for a server. A page in a browser can have a
// name of its own lead to this machine (DNS rebinding), and would then read what the server
// answers: the Host header has that name.
class ServedHosts {
 public:
  // All: for a Unix socket, which no browser reaches.
  ServedHosts() = default;
  // The loopback's, `names` and `bound`: where the server listens; all numbers if that is all
  // addresses.
  ServedHosts(std::set<std::string> names, const base::Address& bound);

  // `host`: a Host header.
  bool contains(std::string_view host) const;
  // "localhost, node7"
  std::string describe() const;

 private:
  bool is_limited_ = false;
  bool is_any_number_ = false;
  std::set<std::string> names_;
};

}  // namespace paceline::distributed
