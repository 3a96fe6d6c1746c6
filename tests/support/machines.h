#pragma once

#include <string>
#include <vector>

#include "support/child_process.h"

namespace paceline::test {

// Machines made of network namespaces, each with an interface on one switch and a host name of its
// own. They share everything else. Takes iproute2 and the rights of root.
class Machines {
 public:
  // Why there can be none here; empty if there can.
  static std::string why_not();

  explicit Machines(int count);
  Machines(const Machines&) = delete;
  Machines& operator=(const Machines&) = delete;
  ~Machines();  // NOLINT(bugprone-exception-escape)

  // The address of a machine in the network that they share.
  static std::string address(int machine);
  // `command` as it runs there.
  std::vector<std::string> on(int machine, const std::vector<std::string>& command) const;
  // Nothing reaches the machine any more, and it is told nothing about that.
  void cut(int machine) const;
  // The machine sends and receives at this rate from now on, as tc writes it: "100kbit".
  void slow(int machine, const std::string& rate) const;
  // Kills all processes of the machine.
  void kill(int machine) const;
  // Waits until the machines have no processes any more, and returns those that are left after
  // kTestTimeout. Shared memory has no file that could be left.
  std::string left_behind() const;

 private:
  std::string name(int machine) const;
  std::string still_there() const;

  int count_;
};

}  // namespace paceline::test
