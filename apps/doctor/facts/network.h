#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace paceline::doctor {

// A network interface that is up.
struct Interface {
  std::string name{};
  std::vector<std::string> addresses{};  // IPv4 before IPv6; none of the IPv6 link
  bool is_loopback = false;
};

// What a name stands for, in the order that the system prefers.
struct Resolution {
  std::vector<std::string> addresses{};
  std::string failure{};  // why there are none; empty if there are some
};

struct NetworkFacts {
  std::vector<Interface> interfaces{};
  std::string host_name{};
  Resolution host{};
};

// Returns within seconds, also if the name's servers do not answer.
NetworkFacts read_network();
Resolution resolve(const std::string& name, std::chrono::milliseconds timeout);

bool is_loopback(const std::string& address);
// The first address by which other machines may reach this one; empty if there is none.
std::string reachable_address(const std::vector<Interface>& interfaces);

}  // namespace paceline::doctor
