// Ranks on several machines, of which one fails: every other rank has to name it.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <signal.h>

#include <chrono>
#include <deque>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "support/child_process.h"
#include "support/machines.h"
#include "support/thoroughness.h"

namespace paceline {
namespace {

using namespace std::chrono_literals;
using test::ChildProcess;
using test::Machines;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Clock = std::chrono::steady_clock;

// No launcher: it would end the ranks, too.
class FaultsAcrossMachines : public ::testing::TestWithParam<std::string> {
 protected:
  // A busy machine may take long to start programs.
  static constexpr int kForming = 1000;

  void SetUp() override {
    if (const std::string reason = Machines::why_not(); !reason.empty()) GTEST_SKIP() << reason;
  }

  // `sizes`: how many ranks each machine has.
  static std::deque<ChildProcess> start(const Machines& machines, const std::vector<int>& sizes,
                                        const std::string& work, int timeout_s = 1000,
                                        int forming_s = kForming) {
    int size = 0;
    for (const int ranks : sizes) size += ranks;
    std::deque<ChildProcess> ranks;
    for (std::size_t node = 0; node < sizes.size(); ++node) {
      for (int local = 0; local < sizes[node]; ++local) {
        ranks.emplace_back(
            machines.on(static_cast<int>(node), {SURVIVOR_PROGRAM, work, std::to_string(timeout_s),
                                                 std::to_string(forming_s)}),
            std::vector<std::pair<std::string, std::string>>{
                {"RANK", std::to_string(ranks.size())},
                {"WORLD_SIZE", std::to_string(size)},
                {"GROUP_RANK", std::to_string(node)},
                {"LOCAL_RANK", std::to_string(local)},
                {"LOCAL_WORLD_SIZE", std::to_string(sizes[node])},
                {"MASTER_ADDR", Machines::address(0)},
                {"MASTER_PORT", "29500"},  // of a network of its own
                {"OMP_NUM_THREADS", "1"}});
      }
    }
    return ranks;
  }

  static void expect(ChildProcess& rank, const ::testing::Matcher<std::string>& what) {
    EXPECT_EQ(rank.wait(), 0) << rank.err();
    const std::string& out = rank.out();
    const std::size_t line = out.find('\n');
    EXPECT_THAT(line == std::string::npos ? out : out.substr(line + 1), what) << rank.err();
  }
};

TEST_P(FaultsAcrossMachines, AKilledRankIsNamedOnAllMachines) {
  const std::vector<int> sizes{2, 1, 2};
  for (const std::size_t killed : {0, 1, 2, 3}) {
    const Machines machines(3);
    auto ranks = start(machines, sizes, GetParam());
    for (auto& rank : ranks) rank.wait_for("ready");
    ranks[killed].signal(SIGKILL);
    ranks[killed].wait();
    const auto begin = Clock::now();
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      if (rank == killed) continue;
      expect(ranks[rank], StartsWith(fmt::format("PeerLost ranks=[{}] ", killed)));
      // A leader says what its node's rank called; a leader that dies says nothing.
      const bool says_where = GetParam() == "all_reduce" && killed == 1;
      if (says_where) {
        EXPECT_THAT(ranks[rank].out(), HasSubstr("all_reduce of "));
      }
    }
    EXPECT_LT(Clock::now() - begin, 20s);
    EXPECT_EQ(machines.left_behind(), "");
  }
}

INSTANTIATE_TEST_SUITE_P(, FaultsAcrossMachines,
                         ::testing::Values("all_reduce", "messages", "new_group", "ddp"),
                         [](const auto& one) { return one.param; });

class OneFaultAcrossMachines : public FaultsAcrossMachines {};

TEST_P(OneFaultAcrossMachines, ACutMachineIsNamedOnBothSides) {
  const Machines machines(2);
  auto ranks = start(machines, {2, 2}, GetParam());
  for (auto& rank : ranks) rank.wait_for("ready");
  machines.cut(1);
  const auto begin = Clock::now();
  for (std::size_t rank = 0; rank < 4; ++rank) {
    const bool first = rank < 2;
    expect(ranks[rank],
           AllOf(StartsWith(fmt::format("PeerLost ranks=[{}] ", first ? "2,3" : "0,1")),
                 HasSubstr("has not answered for 8 s")));
  }
  EXPECT_LT(Clock::now() - begin, 40s);
  EXPECT_EQ(machines.left_behind(), "");
}

TEST_P(OneFaultAcrossMachines, AMachineWithoutItsProcessesIsNamedOnTheOthers) {
  const Machines machines(3);
  auto ranks = start(machines, {2, 2, 1}, GetParam());
  for (auto& rank : ranks) rank.wait_for("ready");
  machines.kill(1);
  const auto begin = Clock::now();
  // Rank 2 may see that rank 3 ends, and say so, before it ends itself.
  for (const std::size_t rank : {0, 1, 4}) {
    expect(ranks[rank],
           AllOf(ContainsRegex("^PeerLost ranks=\\[(2|3|2,3)\\] "), HasSubstr("on node 1")));
  }
  EXPECT_LT(Clock::now() - begin, 30s);
  EXPECT_EQ(machines.left_behind(), "");
}

INSTANTIATE_TEST_SUITE_P(, OneFaultAcrossMachines, ::testing::Values("all_reduce", "ddp"),
                         [](const auto& one) { return one.param; });

class LeadersAcrossMachines : public FaultsAcrossMachines {};

// Nobody else on its machine could tell rank 1.
TEST_P(LeadersAcrossMachines, AKilledLeaderIsNamedToARankThatWaitsForAnotherMachine) {
  const Machines machines(2);
  auto ranks = start(machines, {2, 1}, GetParam());
  for (auto& rank : ranks) rank.wait_for("ready");
  ranks[0].signal(SIGKILL);
  ranks[0].wait();
  for (const std::size_t rank : {1, 2}) expect(ranks[rank], StartsWith("PeerLost ranks=[0] "));
}

INSTANTIATE_TEST_SUITE_P(, LeadersAcrossMachines, ::testing::Values("unsent"),
                         [](const auto& one) { return one.param; });

class FirstMessagesAcrossMachines : public FaultsAcrossMachines {};

// Gloo waits ten seconds where the other rank is to connect: of two machines, that with the lower
// address waits.
TEST_P(FirstMessagesAcrossMachines, WaitForTheirReceiver) {
  const Machines machines(3);
  for (auto& rank : start(machines, {1, 1, 1}, "first")) rank.wait_for("ready");
}

TEST_P(FirstMessagesAcrossMachines, AreNotAwaitedOfALostRank) {
  const Machines machines(3);
  auto ranks = start(machines, {1, 1, 1}, "never");
  for (auto& rank : ranks) rank.wait_for("ready");
  ranks[1].signal(SIGKILL);
  ranks[1].wait();
  const auto begin = Clock::now();
  for (const std::size_t rank : {0, 2}) expect(ranks[rank], StartsWith("PeerLost ranks=[1] "));
  EXPECT_LT(Clock::now() - begin, 5s);
  EXPECT_EQ(machines.left_behind(), "");
}

INSTANTIATE_TEST_SUITE_P(, FirstMessagesAcrossMachines, ::testing::Values("messages"),
                         [](const auto& one) { return one.param; });

class LateAcrossMachines : public FaultsAcrossMachines {};

TEST_P(LateAcrossMachines, ALateRankIsNamedOnAllMachines) {
  const Machines machines(2);
  auto ranks = start(machines, {2, 2}, GetParam(), 3);
  for (const std::size_t rank : {0, 2, 3}) {
    expect(ranks[rank], AllOf(StartsWith("Timeout ranks=[1] "), HasSubstr("did not arrive")));
  }
}

// Rank 0 ends with its error, and the store with it.
TEST_P(LateAcrossMachines, ALateRankIsNamedByAMonitoredBarrier) {
  const Machines machines(2);
  auto ranks = start(machines, {2, 2}, "monitored", 3);
  for (const std::size_t rank : {0, 2, 3}) expect(ranks[rank], StartsWith("Timeout ranks=[1] "));
}

INSTANTIATE_TEST_SUITE_P(, LateAcrossMachines, ::testing::Values("late"),
                         [](const auto& one) { return one.param; });

// Also while ranks meet: of a rank that dies before it has met, others can only say that it is
// late.
TEST_P(FaultsAcrossMachines, ADeathAtAnyMomentIsNamed) {
  std::mt19937 random(static_cast<unsigned>(std::hash<std::string>()(GetParam())));
  for (int death = 0; death < 2 * test::thoroughness(); ++death) {
    const Machines machines(2);
    auto ranks = start(machines, {2, 2}, GetParam(), 10, 10);
    const std::size_t killed = random() % 4;
    const auto moment = std::chrono::milliseconds(random() % 1500);
    std::this_thread::sleep_for(moment);  // the moment is what this is about
    ranks[killed].signal(SIGKILL);
    ranks[killed].wait();
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      if (rank == killed) continue;
      SCOPED_TRACE(fmt::format("rank {}, {} killed after {} ms", rank, killed, moment.count()));
      EXPECT_EQ(ranks[rank].wait(), 0) << ranks[rank].err();
      EXPECT_THAT(ranks[rank].out(), ::testing::ContainsRegex(
                                         fmt::format("(PeerLost|Timeout) ranks=\\[{}\\] ", killed)))
          << ranks[rank].err();
    }
  }
}

class StopsAcrossMachines : public FaultsAcrossMachines {};

// A stopped rank closes no connection and may be anywhere in a call, so that the ranks which wait
// for it keep others waiting.
TEST_P(StopsAcrossMachines, AStopAtAnyMomentIsNamed) {
  std::mt19937 random(1);
  // Groups have the world's timeout, which must suffice to form it on a busy machine.
  const bool forms = GetParam() == "new_group";
  const int stops = (forms ? 2 : 4) * test::thoroughness();
  // Half a second passes before other nodes know whom a rank waits for, and a second before a
  // leader counts as stopped.
  const int timeout = GetParam() == "messages" ? 8 : 3;
  for (int stop = 0; stop < stops; ++stop) {
    const Machines machines(2);
    auto ranks = start(machines, {2, 2}, GetParam(), timeout, forms ? 10 : kForming);
    for (auto& rank : ranks) rank.wait_for("ready");
    const auto stopped = static_cast<std::size_t>(stop % 4);
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 100));
    ranks[stopped].signal(SIGSTOP);
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      if (rank == stopped) continue;
      SCOPED_TRACE(fmt::format("rank {}, {} stopped", rank, stopped));
      expect(ranks[rank], StartsWith(fmt::format("Timeout ranks=[{}] ", stopped)));
    }
    ranks[stopped].signal(SIGKILL);
    ranks[stopped].wait();
  }
}

INSTANTIATE_TEST_SUITE_P(, StopsAcrossMachines,
                         ::testing::Values("all_reduce", "messages", "ddp", "new_group"),
                         [](const auto& one) { return one.param; });

}  // namespace
}  // namespace paceline
