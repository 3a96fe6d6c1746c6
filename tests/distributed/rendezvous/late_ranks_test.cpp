// What the log says of ranks that others wait for at the rendezvous.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <paceline/collectives.h>

#include "distributed/rendezvous/rendezvous_fixture.h"
#include "support/log_lines.h"
#include "support/process_ranks.h"
#include "support/shared.h"
#include "support/stopped.h"

namespace paceline {
namespace {

using namespace std::chrono_literals;
using test::failure_to_join;
using test::Port;
using test::Rendezvous;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::MatchesRegex;
using ::testing::Not;

// What a rank that comes `late`, or not, and then joins a world of three, finds in its log. A late
// one comes once another rank has a line `report` in its log; on a busy machine, others may come
// before it.
std::string log_of_rank(const InitOptions& options, bool late, const std::string& report,
                        std::atomic<bool>& reported) {
  const test::LogLines log(1500ms);
  if (late) {
    EXPECT_TRUE(test::eventually([&] { return reported.load(); }));
  }
  const std::jthread watcher([&](const std::stop_token& stop) {
    while (!stop.stop_requested() && !log.has(report)) std::this_thread::sleep_for(2ms);
    if (log.has(report)) reported = true;
  });
  EXPECT_EQ(failure_to_join(options), "joined");
  return fmt::format("{}", fmt::join(log.all(), "\n"));
}

using Variables = std::map<std::string, std::string>;

std::vector<std::string> logs_of_ranks(
    int late, const std::string& report, const std::string& method,
    const std::function<Variables(int rank)>& variables = [](int) { return Variables(); }) {
  const test::Shared<std::atomic<bool>> reported;
  const auto ends = test::run_process_ranks(3, [&](int rank, shm::BootstrapSockets) {
    InitOptions options{.init_method = method, .timeout = test::kTestTimeout};
    if (method != "env://") {
      options.world_size = 3;
      options.rank = rank;
    }
    test::set_variables(variables(rank));
    return log_of_rank(options, rank == late, report, *reported);
  });
  std::vector<std::string> logs;
  for (const auto& end : ends) {
    EXPECT_TRUE(end.exited_cleanly()) << end.report;
    logs.push_back(end.report);
  }
  return logs;
}

TEST_F(Rendezvous, TheLowestRankReportsWhoHasNotCome) {
  const std::string report =
      "ranks 0 and 2 have waited .* s for rank 1, which has not come to the rendezvous";
  const auto logs = logs_of_ranks(1, report, method());
  EXPECT_THAT(logs[0], ContainsRegex(report + "\nthe rendezvous went on after .* s"));
  EXPECT_THAT(logs[1], IsEmpty());
  EXPECT_THAT(logs[2], Not(ContainsRegex(report)));
}

// Two ranks make a world of two, before or while rank 2 learns of it.
TEST_F(Rendezvous, ARankWhoseWorldSizeDiffersIsNotSaidToGoOn) {
  const test::Shared<std::atomic<bool>> reported;
  const auto ends = test::run_process_ranks(3, [&](int rank, shm::BootstrapSockets) {
    const test::LogLines log(200ms);
    if (rank != 2) {
      EXPECT_TRUE(test::eventually([&] { return reported->load(); }));
    }
    std::jthread watcher;
    if (rank == 2) {
      watcher = std::jthread([&] {
        EXPECT_TRUE(log.wait_for_line());
        *reported = true;
      });
    }
    const std::string failure = failure_to_join(
        {.init_method = method(), .timeout = 20s, .world_size = rank == 2 ? 3 : 2, .rank = rank});
    return failure + "\n" + fmt::format("{}", fmt::join(log.all(), "\n"));
  });
  for (const auto& end : ends) EXPECT_TRUE(end.exited_cleanly()) << end.report;
  EXPECT_THAT(
      ends[2].report,
      MatchesRegex("(.* )?the ranks disagree on the size of the world.*\n(rank 2 has waited "
                   ".* s for ranks 0 and 1, which have not come to the rendezvous\n?)+"));
}

TEST_F(Rendezvous, RanksReportThatRankZeroServesNoStoreYet) {
  const std::string where = Port().method();
  const std::string report =
      "rank [12] of 3 has waited .* s: the rendezvous at 127.0.0.1:[0-9]+, which rank 0 serves, "
      "does "
      "not answer yet";
  const auto logs = logs_of_ranks(0, report, where);
  EXPECT_THAT(logs[0], Not(HasSubstr("does not answer")));
  // The second may come so much later that it need not report.
  EXPECT_THAT(logs[1] + logs[2],
              ContainsRegex(report + "\nthe rendezvous at .* went on after .* s"));
}

// Rank 0 serves the store, in which ranks look up who waits.
TEST_F(Rendezvous, ARankThatWaitsOverGlooReportsThatTheStoreDoesNotAnswer) {
  const test::Shared<test::Stopped> victim;
  const std::string where = Port().method();
  const auto ends = test::run_process_ranks(2, [&](int rank, shm::BootstrapSockets) {
    const test::LogLines log(1500ms);
    const World world = init_process_group(
        {.backend = "gloo", .init_method = where, .timeout = 1min, .world_size = 2, .rank = rank});
    std::jthread waker;
    if (rank == 0) {
      victim->stop();
    } else {
      waker = std::jthread([&] {
        EXPECT_TRUE(log.wait_for_line());
        victim->wake();
      });
    }
    all_reduce(torch::ones({3}));
    return fmt::format("{}", fmt::join(log.all(), "\n"));
  });
  for (const auto& end : ends) EXPECT_TRUE(end.exited_cleanly()) << end.report;
  EXPECT_THAT(ends[1].report,
              ContainsRegex("rank 1 has waited .* s at ALLREDUCE, call [0-9]+ of group world; the "
                            "store at tcp://127.0.0.1:[0-9]+, which knows who waits, does not "
                            "answer\nALLREDUCE, .* went on after .* s"));
}

Variables mpirun_of_this_test(int rank) {
  return {{"OMPI_COMM_WORLD_RANK", std::to_string(rank)},
          {"OMPI_COMM_WORLD_SIZE", "3"},
          {"OMPI_COMM_WORLD_LOCAL_RANK", std::to_string(rank)},
          {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"},
          {"PMIX_NAMESPACE", "late-" + std::to_string(::getppid())}};
}

TEST_F(Rendezvous, RankZeroReportsRanksOfMpirunThatHaveNotCome) {
  const std::string report =
      "rank 0 has waited .* s for rank 2, which has not come to the rendezvous of the processes on "
      "this machine .*";
  const auto logs = logs_of_ranks(2, report, "env://", mpirun_of_this_test);
  EXPECT_THAT(logs[0], ContainsRegex(report + "\n.* went on after .* s"));
  EXPECT_THAT(logs[1], Not(ContainsRegex(report)));
  EXPECT_THAT(logs[2], IsEmpty());
}

TEST_F(Rendezvous, RanksOfMpirunReportThatRankZeroHasNotCome) {
  const std::string report =
      "rank [12] has waited .* s for rank 0, which has not come to the rendezvous of the processes "
      "on this machine.*";
  const auto logs = logs_of_ranks(0, report, "env://", mpirun_of_this_test);
  EXPECT_EQ(logs[0],
            "rank 0 of 3, from OMPI_COMM_WORLD_RANK=0, OMPI_COMM_WORLD_SIZE=3 (mpirun (Open MPI))");
  EXPECT_THAT(logs[1] + logs[2], ContainsRegex(report));
}

}  // namespace
}  // namespace paceline
