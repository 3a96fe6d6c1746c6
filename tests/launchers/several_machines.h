#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <deque>
#include <string>
#include <vector>

#include "support/child_process.h"
#include "support/machines.h"

namespace paceline::test {

class SeveralMachines : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = Machines::why_not(); !reason.empty()) GTEST_SKIP() << reason;
  }

  // One launcher on each of the first machines, numbered. `sizes`: how many ranks each starts.
  static std::deque<ChildProcess> start(const Machines& machines, const std::vector<int>& sizes,
                                        const std::vector<std::string>& program,
                                        const std::vector<std::string>& flags = {}) {
    std::deque<ChildProcess> launchers;
    for (const int ranks : sizes) {
      const int machine = static_cast<int>(launchers.size());
      std::vector<std::string> command{PACELINE_COMMAND,
                                       "run",
                                       fmt::format("--nnodes={}", sizes.size()),
                                       fmt::format("--node-rank={}", machine),
                                       fmt::format("--nproc-per-node={}", ranks),
                                       "--master-addr=" + Machines::address(0)};
      command.insert(command.end(), flags.begin(), flags.end());
      command.insert(command.end(), program.begin(), program.end());
      launchers.emplace_back(machines.on(machine, command));
    }
    return launchers;
  }
  static std::deque<ChildProcess> start(const Machines& machines, int count, int ranks,
                                        const std::vector<std::string>& program,
                                        const std::vector<std::string>& flags = {}) {
    return start(machines, std::vector<int>(static_cast<std::size_t>(count), ranks), program,
                 flags);
  }
};

}  // namespace paceline::test
