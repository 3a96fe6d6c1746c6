// Jobs on several machines over the default backend.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>

#include <chrono>
#include <csignal>
#include <deque>
#include <map>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "launchers/several_machines.h"
#include "launchers/trained.h"

namespace paceline {
namespace {

using namespace std::chrono_literals;
using test::ChildProcess;
using test::Machines;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;
using Clock = std::chrono::steady_clock;

std::size_t sum_of(const std::vector<int>& sizes) {
  return static_cast<std::size_t>(std::accumulate(sizes.begin(), sizes.end(), 0));
}

class BackendOnMachines : public test::SeveralMachines {
 protected:
  // The bits that `program`, whose `shares` of the data are averaged, comes to on one machine.
  static std::string bits_of_one_machine(std::size_t ranks, const std::vector<std::string>& program,
                                         int shares) {
    std::vector<std::string> command{PACELINE_COMMAND, "run", "--deterministic",
                                     fmt::format("--nproc-per-node={}", ranks)};
    command.insert(command.end(), program.begin(), program.end());
    ChildProcess alone(command);
    EXPECT_EQ(alone.wait(), 0) << alone.err();
    test::expect_trained(alone.out(), shares);
    const auto bits = test::bits_in(alone.out());
    EXPECT_THAT(bits, AllOf(SizeIs(ranks), Each(bits.at(0))));
    return bits.at(0);
  }

  // `sizes`: how many ranks each machine has.
  static void expect_bits(const Machines& machines, const std::vector<int>& sizes,
                          const std::vector<std::string>& program, const std::string& expected) {
    SCOPED_TRACE(fmt::format("{} on machines with {} ranks", fmt::join(program, " "),
                             fmt::join(sizes, ", ")));
    // Machines with different numbers of ranks would give them different numbers of threads.
    auto launchers = start(machines, sizes, program, {"--deterministic"});
    std::string out;
    for (auto& launcher : launchers) {
      EXPECT_EQ(launcher.wait(), 0) << launcher.err();
      out += launcher.out();
    }
    EXPECT_THAT(test::bits_in(out), AllOf(SizeIs(sum_of(sizes)), Each(expected)));
  }

  static void expect_bits_of_one_machine(const std::vector<std::vector<int>>& jobs) {
    std::map<std::size_t, std::string> expected;  // by the number of ranks
    for (const auto& sizes : jobs) {
      const std::size_t ranks = sum_of(sizes);
      if (!expected.contains(ranks)) {
        expected[ranks] = bits_of_one_machine(ranks, {TRAIN_PROGRAM}, static_cast<int>(ranks));
      }
      const Machines machines(static_cast<int>(sizes.size()));
      expect_bits(machines, sizes, {TRAIN_PROGRAM}, expected[ranks]);
    }
  }
};

TEST_F(BackendOnMachines, GivesTheBitsOfOneMachine) {
  expect_bits_of_one_machine({{1, 1}, {1, 1, 1}, {2, 2}, {3, 3}, {4, 4}, {2, 2, 2, 2}});
}

TEST_F(BackendOnMachines, GivesTheBitsOfOneMachineOnUnevenOnes) {
  expect_bits_of_one_machine({{3, 1}, {1, 3}, {2, 1, 1}});
}

TEST_F(BackendOnMachines, GivesTheBitsOfOneProcessWithLogicalRanks) {
  for (const auto& [logical, sizes] : {std::pair{8, std::vector{2, 2}}, {5, {2, 1}}, {7, {1, 3}}}) {
    const std::vector<std::string> program{TRAIN_PROGRAM, "logical", std::to_string(logical)};
    const std::string expected = bits_of_one_machine(1, program, logical);
    const Machines machines(2);
    expect_bits(machines, sizes, program, expected);
  }
}

TEST_F(BackendOnMachines, PassesTheTestsOfCollectivesAndMessages) {
  for (const auto& sizes : {std::vector{2, 2}, {2, 1}}) {
    const Machines machines(2);
    auto launchers =
        start(machines, sizes,
              {"env", "PACELINE_TEST_LAUNCHED=1", DISTRIBUTED_TEST, "--gtest_brief=1",
               "--gtest_filter=*/launched*-AllReduceAlgorithms*:BackendsTable*:*AnyRank*"});
    for (auto& launcher : launchers) {
      EXPECT_EQ(launcher.wait(), 0) << launcher.out() << launcher.err();
      EXPECT_THAT(launcher.out(), AllOf(HasSubstr("[  PASSED  ] "), Not(HasSubstr(" 0 tests")),
                                        Not(HasSubstr("SKIPPED"))));
    }
  }
}

TEST_F(BackendOnMachines, GivesTheSameBitsOverASlowLink) {
  const std::string expected = bits_of_one_machine(3, {TRAIN_PROGRAM}, 3);
  const Machines machines(2);
  machines.slow(1, "250kbit");
  const auto begin = Clock::now();
  expect_bits(machines, {2, 1}, {TRAIN_PROGRAM}, expected);
  // Each of 5 steps sends 14.6 kB of gradients each way.
  EXPECT_GT(Clock::now() - begin, 2s);
  EXPECT_EQ(machines.left_behind(), "");
}

// Launchers, leaders, the store and Gloo.
TEST_F(BackendOnMachines, ListensAtTheMachinesAddressesOnly) {
  const Machines machines(2);
  auto launchers = start(machines, {2, 2}, {SURVIVOR_PROGRAM, "all_reduce"});
  for (auto& launcher : launchers) launcher.wait_for("ready");
  for (const int machine : {0, 1}) {
    ChildProcess listening(machines.on(machine, {"ss", "-Hltn"}));
    EXPECT_EQ(listening.wait(), 0) << listening.err();
    std::istringstream lines(listening.out());
    std::size_t sockets = 0;
    for (std::string line; std::getline(lines, line); ++sockets) {
      EXPECT_THAT(line, HasSubstr(" " + Machines::address(machine) + ":"));
    }
    EXPECT_GT(sockets, 2);
  }
  launchers[0].signal(SIGTERM);
  for (auto& launcher : launchers) launcher.wait();
}

TEST_F(BackendOnMachines, EndsWithAMachineWhoseProcessesAreKilled) {
  const Machines machines(3);
  auto launchers = start(machines, {2, 2, 1}, {SURVIVOR_PROGRAM, "ddp"});
  for (auto& launcher : launchers) launcher.wait_for("ready");
  const auto begin = Clock::now();
  machines.kill(1);
  EXPECT_EQ(launchers[1].wait(), 128 + SIGKILL);
  for (const std::size_t other : {0, 2}) {
    EXPECT_EQ(launchers[other].wait(), 1) << launchers[other].err();
    EXPECT_THAT(launchers[other].err(), HasSubstr("node 1 (machine1), ranks 2 to 3: was lost"));
  }
  EXPECT_LT(Clock::now() - begin, 30s);
  EXPECT_EQ(machines.left_behind(), "");
}

}  // namespace
}  // namespace paceline
