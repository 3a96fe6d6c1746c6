// Processes that torchrun starts again with the store of those before.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "distributed/rendezvous/rendezvous_fixture.h"
#include "support/eventually.h"
#include "support/process_ranks.h"
#include "support/shared.h"

namespace paceline {
namespace {

using test::failure_to_join;
using test::kLate;
using test::kTimeout;
using test::Port;
using test::Rendezvous;
using ::testing::ElementsAre;

// The processes between two changes of a job's machines.
struct AgentsRound {
  int size;
  std::vector<int> ranks;  // that come to the rendezvous

  bool is_complete() const { return ranks.size() == static_cast<std::size_t>(size); }
};

struct AgentStoreState {
  std::atomic<std::uint16_t> port{0};
  std::atomic<std::size_t> done{0};
};

// What the rank says of two worlds, or of one that cannot form.
std::string join_round(const AgentsRound& round, int rank, std::uint16_t port) {
  test::set_variables({{"RANK", std::to_string(rank)},
                       {"WORLD_SIZE", std::to_string(round.size)},
                       {"MASTER_ADDR", "127.0.0.1"},
                       {"MASTER_PORT", std::to_string(port)},
                       {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                       {"TORCHELASTIC_RESTART_COUNT", std::to_string(rank)}});
  if (!round.is_complete()) return failure_to_join({.timeout = kTimeout});
  const std::string first = failure_to_join({.timeout = 2 * kLate});
  return first + ", " + failure_to_join({.timeout = 2 * kLate});
}

// What the ranks say, round by round. A round starts once all processes of the round before it have
// ended.
std::vector<std::string> run_rounds(const std::vector<AgentsRound>& rounds) {
  struct Process {
    const AgentsRound* round;
    int rank;
    std::size_t before;  // how many processes the rounds before have
  };
  std::vector<Process> processes;
  for (const AgentsRound& round : rounds) {
    const std::size_t before = processes.size();
    for (const int rank : round.ranks) processes.push_back({&round, rank, before});
  }
  const test::Shared<AgentStoreState> state;
  const int agent = static_cast<int>(processes.size());
  const auto ends =
      test::run_process_ranks(agent + 1, [&](int number, shm::BootstrapSockets) -> std::string {
        if (number == agent) {
          const auto store = c10::make_intrusive<c10d::TCPStore>(
              "127.0.0.1",
              c10d::TCPStoreOptions{.port = 0, .isServer = true, .waitWorkers = false});
          state->port = store->getPort();
          EXPECT_TRUE(test::eventually([&] { return state->done == processes.size(); }));
          return "";
        }
        const Process& process = processes[static_cast<std::size_t>(number)];
        EXPECT_TRUE(
            test::eventually([&] { return state->port != 0 && state->done >= process.before; }));
        auto text = join_round(*process.round, process.rank, state->port);
        ++state->done;
        return text;
      });
  std::vector<std::string> reports;
  for (const auto& end : ends) reports.push_back(end.report);
  reports.pop_back();
  return reports;
}

constexpr const char* kBothJoined = "joined, joined";

TEST_F(Rendezvous, ProcessesOfAnAgentDoNotTakeThoseBeforeForTheirPeers) {
  EXPECT_THAT(run_rounds({{2, {0, 1}}, {3, {0, 1, 2}}, {2, {0, 1}}}), ::testing::Each(kBothJoined));
}

// Each agent counts the restarts that it has begun itself.
TEST_F(Rendezvous, RanksMeetWhoseAgentsCountRestartsDifferently) {
  const std::string port = Port().number();
  const auto ends = test::run_process_ranks(2, [&](int rank, shm::BootstrapSockets) {
    test::set_variables({{"RANK", std::to_string(rank)},
                         {"WORLD_SIZE", "2"},
                         {"MASTER_ADDR", "127.0.0.1"},
                         {"MASTER_PORT", port},
                         {"TORCHELASTIC_RESTART_COUNT", std::to_string(rank)}});
    return failure_to_join({.timeout = 2 * kLate});
  });
  for (const auto& end : ends) EXPECT_EQ(end.report, "joined");
}

TEST_F(Rendezvous, ProcessesOfAnAgentMeetAfterARoundThatWasNotComplete) {
  EXPECT_THAT(
      run_rounds({{2, {1}}, {2, {0}}, {2, {0, 1}}}),
      ElementsAre("PeerError(0): rank 0 did not come to the rendezvous within the timeout of 1 s; "
                  "this is rank 1 of 2",
                  "PeerError(1): rank 1 did not come to the rendezvous within the timeout of 1 s; "
                  "this is rank 0 of 2",
                  kBothJoined, kBothJoined));
}

}  // namespace
}  // namespace paceline
