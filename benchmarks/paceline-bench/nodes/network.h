#pragma once

#include <sys/types.h>

#include <deque>
#include <string>
#include <vector>

namespace paceline::bench {

// A process of its own, in a network namespace of its own. It ends with this one.
class NamespaceProcess {
 public:
  // Throws Error.
  NamespaceProcess();
  NamespaceProcess(const NamespaceProcess&) = delete;
  NamespaceProcess& operator=(const NamespaceProcess&) = delete;
  ~NamespaceProcess();
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_;
};

// Nodes on this machine: network namespaces that each have an interface eth0, joined by a switch.
// They share cores and memory, and vanish with this process. Takes the rights of root, iproute2 and
// util-linux.
class Network {
 public:
  // `rate`: of each node's link, in each direction, as tc(8) writes it ("1gbit"). Throws Error.
  Network(int nodes, const std::string& rate);

  // By node: a process in its namespace.
  std::vector<pid_t> processes() const;

 private:
  NamespaceProcess switch_;
  std::deque<NamespaceProcess> nodes_;
};

// In a Network.
std::string node_address(int node);

// Call first in a rank that launch::run_job started: moves it to its node, and sets the variables
// of a rank there. `processes`: of the Network; as many ranks on each node. Throws Error.
void enter_node(const std::vector<pid_t>& processes);

}  // namespace paceline::bench
