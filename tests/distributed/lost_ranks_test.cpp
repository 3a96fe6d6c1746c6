// Ranks that are late, leave by an exception, or are forked.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <chrono>
#include <csignal>
#include <optional>
#include <stdexcept>
#include <thread>

#include <paceline/collectives.h>
#include <paceline/ddp.h>
#include <paceline/record.h>

#include "support/cases.h"
#include "support/log_lines.h"
#include "support/shared.h"
#include "support/stopped.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

using namespace std::chrono_literals;
using test::RankContext;
using ::testing::AllOf;
using ::testing::HasSubstr;

// A rank that computes, or is stopped, in its backward. What the log of the other says.
std::vector<std::string> logs_of_late_backward(bool stops,
                                               const std::string& backend = "paceline") {
  struct SharedState {
    test::Stopped victim;
    std::atomic<bool> reported{false};
  };
  const test::Shared<SharedState> state;
  const auto ends = test::run_torch_ranks(2, backend, [&](const RankContext& context) {
    const test::LogLines log(2s);
    const World world = init_process_group(context.init);
    auto net = torch::nn::Sequential(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
    DistributedDataParallel model(net);
    for (int step = 1; step <= 2; ++step) {
      auto output = model(torch::ones({1, 4}));
      const bool late = context.rank == 1 && step == 2;
      if (late && stops) state->victim.stop();
      if (late && !stops) {
        EXPECT_TRUE(test::eventually([&] { return state->reported.load(); }));
      }
      std::jthread watcher;
      if (context.rank == 0 && step == 2) {
        watcher = std::jthread([&] {
          EXPECT_TRUE(log.wait_for_line());
          state->reported = true;
          if (stops) state->victim.wake();
        });
      }
      output.sum().backward();
    }
    return fmt::format("{}", fmt::join(log.all(), "\n"));
  });
  std::vector<std::string> logs;
  for (const auto& end : ends) {
    EXPECT_TRUE(end.exited_cleanly()) << end.report;
    logs.push_back(end.report);
  }
  return logs;
}

constexpr const char* kLateInBackward =
    "rank 0 has waited .* s for rank 1 at backward, step 2 of group world, bucket 0 "
    "\\(.*1.weight.*\\)"
    "; rank 0: it has . of . buckets ready, .*; rank 1: it has no bucket of this step ready";

TEST(Late, InBackwardIsReportedAndGoesOn) {
  const auto logs = logs_of_late_backward(false);
  EXPECT_THAT(logs[0], ::testing::MatchesRegex(std::string(kLateInBackward) +
                                               "\nbackward, step 2 .* went on after .* s"));
  EXPECT_EQ(logs[1], "");
}

TEST(Late, AndStoppedInBackwardIsReportedAsStopped) {
  const auto logs = logs_of_late_backward(true);
  EXPECT_THAT(logs[0],
              ::testing::MatchesRegex(std::string(kLateInBackward) +
                                      ", and its process [0-9]+ is stopped\nbackward, .*"));
  EXPECT_EQ(logs[1], "");
}

TEST(Late, InBackwardOverGlooIsReportedAndGoesOn) {
  const auto logs = logs_of_late_backward(false, "gloo");
  EXPECT_THAT(logs[0], ::testing::MatchesRegex(
                           "rank 0 has waited .* s for rank 1 at ALLREDUCE, call [0-9]+ of group "
                           "world\nALLREDUCE, call [0-9]+ of group world went on after .* s"));
  EXPECT_EQ(logs[1], "");
}

TEST(Late, OverGlooIsReportedByTheLowestRankThatWaits) {
  struct SharedState {
    test::Stopped victim;
    std::atomic<bool> awake{false};
  };
  const std::string report =
      "ranks 0 and 2 have waited .* s for rank 1 at ALLREDUCE, call [0-9]+ of group world";
  const test::Shared<SharedState> state;
  const auto ends = test::run_torch_ranks(3, "gloo", [&](const RankContext& context) {
    const test::LogLines log(2s);
    const World world = init_process_group(context.init);
    barrier();
    std::jthread waker;
    if (context.rank == 1) {
      state->victim.stop();
      state->awake = true;
    } else {
      waker = std::jthread([&] {
        EXPECT_TRUE(test::eventually([&] { return log.has(report) || state->awake; }));
        state->victim.wake();
      });
    }
    const auto tensor = torch::ones({3});
    all_reduce(tensor);
    EXPECT_EQ(tensor[0].item<float>(), 3);
    return fmt::format("{}", fmt::join(log.all(), "\n"));
  });
  for (const auto& end : ends) EXPECT_TRUE(end.exited_cleanly()) << end.report;
  EXPECT_THAT(ends[0].report,
              ::testing::ContainsRegex(
                  report + "\nALLREDUCE, call [0-9]+ of group world went on after .* s"));
  EXPECT_EQ(ends[1].report, "");
}

// Each waits for what the other sends.
TEST(Late, OverGlooAreNamedIfAllWaitAndAreNotSaidToGoOn) {
  const auto ends = test::run_torch_ranks(2, "gloo", [](const RankContext& context) {
    const test::LogLines log(1s);
    auto init = context.init;
    init.timeout = 8s;
    const World world = init_process_group(init);
    barrier();
    const auto tensor = torch::ones({3});
    EXPECT_THROW(broadcast(tensor, {.src = 1 - context.rank}), Error);
    return fmt::format("{}", fmt::join(log.all(), "\n"));
  });
  for (const auto& end : ends) EXPECT_TRUE(end.exited_cleanly()) << end.report;
  EXPECT_THAT(ends[0].report,
              ::testing::ContainsRegex("ranks 0 and 1 have waited .* s at BROADCAST, call [0-9]+ "
                                       "of group world: every rank waits in a collective"));
  EXPECT_THAT(ends[0].report + ends[1].report, ::testing::Not(HasSubstr("went on")));
}

TEST(Late, WithAMessageOverGlooIsWaitedFor) {
  const auto ends = test::run_torch_ranks(2, "gloo", [](const RankContext& context) {
    const test::LogLines log(50ms);
    const World world = init_process_group(context.init);
    const auto tensor = torch::full({3}, context.rank);
    if (context.rank == 1) {
      std::this_thread::sleep_for(500ms);  // the input of this test
      send(tensor, 0);
    } else {
      EXPECT_EQ(recv(tensor, {.src = 1}), 1);
      EXPECT_EQ(tensor[0].item<float>(), 1);
    }
    return std::string();
  });
  for (const auto& end : ends) EXPECT_TRUE(end.exited_cleanly()) << end.report;
}

// What rank 0's log says of a wait for a message that does not come. It ends after the `timeout` of
// the wait, or of the group.
std::string log_of_late_message(std::optional<std::chrono::milliseconds> timeout) {
  const auto ends = test::run_torch_ranks(2, "paceline", [&](const RankContext& context) {
    const test::LogLines log(200ms);
    const World world = init_process_group(context.init);
    auto tensor = torch::zeros({4});
    if (context.rank == 1) {
      EXPECT_THROW(barrier(), PeerError);
      return std::string();
    }
    ProcessGroup().c10d()->getBackend(at::kCPU)->setTimeout(timeout ? 1min : 1s);
    auto works = batch_isend_irecv({{P2POp::Kind::irecv, tensor, 1}});
    EXPECT_THROW(timeout ? works[0].wait(*timeout) : works[0].wait(), Timeout);
    return fmt::format("{}", fmt::join(log.all(), "\n"));
  });
  for (const auto& end : ends) EXPECT_TRUE(end.exited_cleanly()) << end.report;
  return ends[0].report;
}

constexpr const char* kLateMessage =
    "(rank 0 has waited .* s for rank 1 at recv of 4 float32 from rank 1 with tag 0 in group "
    "world\n?)+";

TEST(Late, WithAMessageIsNotSaidToGoOnAfterATimeout) {
  EXPECT_THAT(log_of_late_message(1s), ::testing::MatchesRegex(kLateMessage));
  EXPECT_THAT(log_of_late_message({}), ::testing::MatchesRegex(kLateMessage));
}

// Rank 1 throws inside `body`; what the others throw must carry its text.
void check_exception(int size, const std::function<void(const RankContext&)>& body) {
  const auto ends = test::run_torch_ranks(size, "paceline", [&](const RankContext& context) {
    std::string text = "no error";
    const int code = record([&] {
      const World world = init_process_group(context.init);
      try {
        while (true) body(context);
      } catch (const PeerLost& error) {
        text = error.what();
      }
    });
    return fmt::format("{} {}", code, text);
  });
  for (int rank = 0; rank < size; ++rank) {
    const auto& end = ends[static_cast<std::size_t>(rank)];
    if (rank == 1) {
      EXPECT_EQ(end.report, "1 no error");
    } else {
      EXPECT_THAT(end.report, AllOf(HasSubstr("rank 1 left the group with an exception"),
                                    HasSubstr("the disk is full")));
    }
  }
}

using ThrownRanks = test::SizeTest;
INSTANTIATE_TEST_SUITE_P(, ThrownRanks, ::testing::Values(2, 3, 4, 8), test::CaseName());

TEST_P(ThrownRanks, BetweenCollectivesReachesOtherRanks) {
  check_exception(GetParam(), [](const RankContext& context) {
    barrier();
    if (context.rank == 1) throw std::runtime_error("the disk is full");
  });
}

// Who catches the exception of a World himself, inside record, is found out at the next call.
TEST(Thrown, CaughtInsideRecordReachesOtherRanksLater) {
  const auto ends = test::run_torch_ranks(2, "paceline", [](const RankContext& context) {
    std::string text = "no error";
    const int code = record([&] {
      try {
        const World world = init_process_group(context.init);
        barrier();
        if (context.rank == 1) throw std::runtime_error("the disk is full");
        barrier();
      } catch (const PeerLost& error) {
        text = error.what();
      } catch (const std::runtime_error&) {
        EXPECT_THROW(barrier(), UsageError);
        text = "caught";
      }
    });
    EXPECT_EQ(code, 0);
    return text;
  });
  EXPECT_EQ(ends[1].report, "caught");
  EXPECT_THAT(ends[0].report, HasSubstr("rank 1 left the group with an exception"));
}

struct ThrowingImpl : torch::nn::Module {
  torch::nn::Linear fc{register_module("fc", torch::nn::Linear(4, 4))};
  torch::Tensor forward(const torch::Tensor& x, bool fail_forward, bool fail_backward) {
    if (fail_forward) throw std::runtime_error("the disk is full");
    auto y = fc(x);
    if (fail_backward) {
      y.register_hook([](const torch::Tensor&) -> torch::Tensor {
        throw std::runtime_error("the disk is full");
      });
    }
    return y;
  }
};
TORCH_MODULE(Throwing);

// Rank 1's third step throws in its forward or in its backward.
void check_exception_in_step(int size, bool in_forward) {
  check_exception(size, [in_forward](const RankContext& context) {
    static DistributedDataParallel model(Throwing{});
    static int step = 0;
    const bool fail = context.rank == 1 && ++step == 3;
    model(torch::ones({2, 4}), fail && in_forward, fail && !in_forward).sum().backward();
  });
}

TEST_P(ThrownRanks, InForwardReachesOtherRanks) {
  check_exception_in_step(GetParam(), true);
}

TEST_P(ThrownRanks, InBackwardReachesOtherRanks) {
  check_exception_in_step(GetParam(), false);
}

// After a failure, gradients are no longer stored in memory that a late rank might write to, and
// the survivors can start again.
TEST(Lost, SurvivorsInitialiseAgainAndTrain) {
  const auto ends = test::run_torch_ranks(4, "paceline", [](const RankContext& context) {
    {
      const World world = init_process_group(context.init);
      DistributedDataParallel model(torch::nn::Linear(4, 4));
      // The forward of the second step makes a call of the group.
      for (int step = 0; step < 2; ++step) model(torch::ones({1, 4})).sum().backward();
      if (context.rank == 2) ::raise(SIGKILL);
      EXPECT_THROW(model(torch::ones({1, 4})).sum().backward(), PeerLost);
      EXPECT_THROW(barrier(), PeerLost) << "a failed group refuses further calls";
      EXPECT_EQ(model.parameters()[1].grad()[0].item<float>(), 3) << "accumulated, not averaged";
    }
    auto again = context.init;
    again.world_size = 3;
    again.rank = context.rank == 3 ? 2 : context.rank;
    const World world = init_process_group(again);
    auto t = torch::ones({1});
    all_reduce(t);
    EXPECT_EQ(t.item<float>(), 3);
    return std::string("went on");
  });
  for (const int rank : {0, 1, 3}) {
    const auto& end = ends[static_cast<std::size_t>(rank)];
    EXPECT_EQ(end.report, "went on");
    EXPECT_TRUE(end.exited_cleanly());
  }
}

// Rank 2, which is alone on its node.
TEST(LeftRanks, OfAnotherNodeAreMissingInANewGroupAndInAMonitoredBarrier) {
  if (!is_gloo_available()) GTEST_SKIP() << "built without Gloo";
  for (const bool forms_group : {true, false}) {
    const auto ends = test::run_torch_ranks(3, test::kAcrossNodes, [&](const RankContext& context) {
      InitOptions init = context.init;
      init.timeout = 20s;
      const World world = init_process_group(init);
      barrier();
      if (context.rank == 2) return std::string();
      try {
        forms_group ? static_cast<void>(new_group({0, 2})) : monitored_barrier();
      } catch (const PeerLost& error) {
        return std::string(error.what());
      }
      return std::string("went on");
    });
    const auto missing =
        HasSubstr(fmt::format("rank 2 on node 1 has left the group and is missing in {}",
                              forms_group ? "new_group" : "monitored_barrier"));
    EXPECT_THAT(ends[0].report, missing);
    if (!forms_group) {
      EXPECT_THAT(ends[1].report, missing);
    }
  }
}

// Gloo's destructors would wait for the parent's threads.
TEST(Forked, ChildOfAWorldOverGlooMayLeaveIt) {
  test::expect_torch_ranks(2, "gloo", [](int, int) {
    const auto group = new_group();
    all_reduce(torch::ones({1}));
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(60);
      destroy_process_group(group);
      destroy_process_group();
      ::_exit(0);
    }
    int status = -1;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
    all_reduce(torch::ones({1}), {.group = group});
  });
}

TEST(Forked, ChildMayExitButNotCall) {
  test::expect_torch_ranks(2, "paceline", [](int, int) {
    const auto pending = torch::ones({1});
    Work work = all_reduce_async(pending);  // from now on the group has a thread
    const pid_t child = ::fork();
    if (child == 0) {
      const auto is_refused = [](const auto& call) {
        try {
          call();
          return false;
        } catch (const UsageError&) {
          return true;
        }
      };
      const bool refused =
          is_refused([] { barrier(); }) && is_refused([] { static_cast<void>(barrier_async()); }) &&
          is_refused([] { const DistributedDataParallel model(torch::nn::Linear(2, 2)); });
      destroy_process_group();
      ::_exit(refused ? 0 : 1);
    }
    work.wait();
    int status = -1;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
    auto t = torch::ones({1});
    all_reduce(t);
    EXPECT_EQ(t.item<float>(), 2);
  });
}

}  // namespace
}  // namespace paceline
