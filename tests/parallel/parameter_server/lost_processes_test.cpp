// Processes that are killed, stopped or late, and new ones in their place.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <paceline/error.h>

#include "parallel/parameter_server/jobs.h"
#include "support/eventually.h"
#include "support/shared.h"
#include "support/stopped.h"

namespace paceline {
namespace {

using test::JobContext;
using test::JobShape;
using test::run_job;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;

at::Tensor make_weight() {
  return torch::zeros({1}, torch::TensorOptions(torch::kFloat64).requires_grad(true));
}

// Both workers step together, then the second is killed, the first goes on alone, and a new process
// steps with it again.
TEST(LostProcesses, ANewProcessTakesPartFromTheNextStepOn) {
  const JobShape shape{.servers = 2, .workers = 2, .replaced = {3}};
  const auto ends = run_job(shape, [](const JobContext& context) {
    auto v = make_weight();
    auto w = make_weight();
    const bool is_new = context.process != context.rank;
    if (is_new) context.store->wait({"alone"});
    ParameterServer server({{"v", v}, {"w", w}}, test::sgd(1), context.options);
    if (server.is_server()) {
      server.serve();
      EXPECT_EQ(server.stats().version, 3);
      return std::string();
    }
    const auto step = [&] {
      for (auto& one : {v, w}) {
        one.mutable_grad() = torch::full({1}, context.rank == 2 ? -2.0 : -4.0, torch::kFloat64);
      }
      server.step();
    };
    if (!is_new) {
      step();
      EXPECT_EQ(v.item<double>(), 3);
      if (context.rank == 3) ::raise(SIGKILL);
      step();
      EXPECT_EQ(w.item<double>(), 5);
      context.store->set("alone", "");
      context.store->wait({"joined"});
    } else {
      EXPECT_EQ(v.item<double>(), 5);  // it starts with the present parameters
      context.store->set("joined", "");
    }
    step();
    EXPECT_EQ(v.item<double>(), 8);
    EXPECT_EQ(w.item<double>(), 8);
    return std::string();
  });
  EXPECT_TRUE(ends[3].killed());
  for (const std::size_t process : {0U, 1U, 2U, 4U}) {
    EXPECT_TRUE(ends[process].exited_cleanly()) << ends[process].report;
  }
}

TEST(LostProcesses, AServersDeathIsPeerLostOnEveryWorker) {
  const auto ends = run_job({.servers = 2, .workers = 2}, [](const JobContext& context) {
    auto v = make_weight();
    auto w = make_weight();
    ParameterServer server({{"v", v}, {"w", w}}, test::sgd(1), context.options);
    if (context.rank == 1) {
      std::jthread killer([&] {
        context.store->wait({"stepped"});
        ::raise(SIGKILL);
      });
      server.serve();
    }
    if (server.is_server()) {
      EXPECT_THROW(server.serve(), PeerLost);  // no worker can leave any more
      return std::string();
    }
    try {
      for (;;) {
        v.mutable_grad() = -torch::ones({1}, torch::kFloat64);
        w.mutable_grad() = -torch::ones({1}, torch::kFloat64);
        server.step();
        context.store->set("stepped", "");
      }
    } catch (const PeerLost& error) {
      EXPECT_THAT(error.ranks(), ::testing::ElementsAre(1));
      EXPECT_THROW(server.pull(), PeerLost);
      EXPECT_THROW(server.leave(), PeerLost);
      return std::string(error.what());
    }
  });
  EXPECT_TRUE(ends[1].killed());
  EXPECT_TRUE(ends[0].exited_cleanly()) << ends[0].report;
  for (const std::size_t worker : {2U, 3U}) {
    EXPECT_TRUE(ends[worker].exited_cleanly()) << ends[worker].report;
    EXPECT_THAT(ends[worker].report,
                AllOf(HasSubstr("rank 1 was lost"),
                      ContainsRegex("ParameterServer was in (push|pull); pushes so far: [0-9]+")));
  }
}

// What it held is lost. The other server waits for no new worker then, since none could train.
TEST(LostProcesses, AServerIsNotReplaced) {
  const JobShape shape{.servers = 2, .workers = 1, .replaced = {1}};
  const auto ends = run_job(shape, [](const JobContext& context) {
    ::setenv("PACELINE_MAX_REPLACEMENTS", "100", 1);
    auto v = make_weight();
    auto w = make_weight();
    const bool is_new = context.process != context.rank;
    if (is_new) context.store->wait({"lost"});
    try {
      ParameterServer server({{"v", v}, {"w", w}}, test::sgd(1), context.options);
      if (context.rank == 1) ::raise(SIGKILL);
      if (server.is_server()) server.serve();
      for (;;) {
        v.mutable_grad() = w.mutable_grad() = torch::ones({1}, torch::kFloat64);
        server.step();
      }
    } catch (const PeerLost& error) {
      if (context.rank == 2) context.store->set("lost", "");
      return std::string(error.what());
    }
  });
  EXPECT_TRUE(ends[1].killed());
  EXPECT_THAT(ends[0].report, HasSubstr("all workers were lost"));
  EXPECT_THAT(ends[2].report, HasSubstr("rank 1 was lost"));
  EXPECT_THAT(ends[3].report, HasSubstr("rank 1, a server, was lost, and with it the parameters"));
}

// As rank 0's store does over tcp://, if its process ends before another server.
class ClosedStore final : public c10d::PrefixStore {
 public:
  using PrefixStore::PrefixStore;
  bool check(const std::vector<std::string>& keys) override {
    if (closed) throw std::runtime_error("the store is closed");
    return PrefixStore::check(keys);
  }

  std::atomic<bool> closed = false;
};

TEST(LostProcesses, AServerServesItsWorkersWithoutTheStore) {
  const JobShape shape{.workers = 2};
  const auto ends = run_job(shape, [](const JobContext& context) {
    auto options = context.options;
    const auto store = c10::make_intrusive<ClosedStore>("", options.init.store);
    options.init.store = store;
    auto w = make_weight();
    ParameterServer server({{"w", w}}, test::sgd(1), options);
    if (server.is_server()) {
      std::jthread closer([&] {
        context.store->wait({"left"});
        store->closed = true;
        context.store->set("closed", "");
      });
      server.serve();
      EXPECT_EQ(server.stats().version, 2);
      return std::string();
    }
    w.mutable_grad() = torch::ones({1}, torch::kFloat64);
    server.step();
    if (context.rank == 2) {
      server.leave();
      context.store->set("left", "");
      return std::string();
    }
    context.store->wait({"closed"});
    server.step();
    return std::string();
  });
  test::expect_clean(ends);
}

struct AgentState {
  std::atomic<int> port = 0;
  std::atomic<int> ended = 0;
};

// torchrun starts all processes again, with the store of those before. Each of its agents counts
// the restarts that it has begun itself.
TEST(LostProcesses, AreNotMetByThoseThatAgentsStartAgain) {
  constexpr int kRanks = 2;
  constexpr int kProcesses = 2 * kRanks;
  const test::Shared<AgentState> state;
  const auto ends = test::run_process_ranks(
      kProcesses + 1, [&](int process, const shm::BootstrapSockets&) -> std::string {
        if (process == kProcesses) {
          const c10d::TCPStore agent("127.0.0.1",
                                     {.port = 0, .isServer = true, .waitWorkers = false});
          state->port = agent.getPort();
          EXPECT_TRUE(test::eventually([&] { return state->ended == kProcesses; }));
          return "";
        }
        const bool starts_again = process >= kRanks;
        const int rank = process % kRanks;
        EXPECT_TRUE(test::eventually(
            [&] { return state->port != 0 && (!starts_again || state->ended == kRanks); }));
        at::set_num_threads(1);
        for (const auto& [name, value] :
             {std::pair("RANK", rank), std::pair("WORLD_SIZE", kRanks),
              std::pair("MASTER_PORT", state->port.load()),
              std::pair("TORCHELASTIC_RESTART_COUNT", starts_again ? rank : 0)}) {
          ::setenv(name, std::to_string(value).c_str(), 1);
        }
        ::setenv("MASTER_ADDR", "127.0.0.1", 1);
        ::setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
        std::string text;
        try {
          auto w = make_weight();
          ParameterServer server({{"w", w}}, test::sgd(1),
                                 {.init = {.timeout = std::chrono::seconds(30)}});
          if (server.is_server()) {
            server.serve();
          } else {
            w.mutable_grad() = -torch::ones({1}, torch::kFloat64);
            server.step();
            if (!starts_again) throw std::runtime_error("the worker fails");
          }
          text = fmt::format("w = {}", w.item<double>());
        } catch (const std::exception& error) {
          text = error.what();
        }
        ++state->ended;
        return text;
      });
  EXPECT_THAT(ends[0].report, HasSubstr("all workers were lost"));
  EXPECT_EQ(ends[1].report, "the worker fails");
  EXPECT_EQ(ends[2].report, "w = 1");
  EXPECT_EQ(ends[3].report, "w = 1");
}

TEST(LostProcesses, AStoppedServerIsATimeoutOfItsWorkers) {
  const test::Shared<test::Stopped> stopped;
  const JobShape shape{.servers = 2, .workers = 1, .timeout = std::chrono::seconds(4)};
  const auto ends = run_job(shape, [&](const JobContext& context) {
    auto v = make_weight();
    auto w = make_weight();
    ParameterServer server({{"v", v}, {"w", w}}, test::sgd(1), context.options);
    if (server.is_server()) {
      std::jthread stopper;
      if (context.rank == 1) {
        stopper = std::jthread([&] {
          context.store->wait({"stepped"});
          stopped->stop();
        });
      }
      EXPECT_THROW(server.serve(), PeerLost);  // its only worker has left by an error
      return std::string();
    }
    try {
      for (;;) {
        v.mutable_grad() = w.mutable_grad() = torch::ones({1}, torch::kFloat64);
        server.step();
        context.store->set("stepped", "");
      }
    } catch (const PeerError& error) {
      EXPECT_NE(dynamic_cast<const Timeout*>(&error), nullptr);
      EXPECT_THAT(error.ranks(), ::testing::ElementsAre(1));
      stopped->wake();
      return std::string(error.what());
    }
  });
  test::expect_clean(ends);
  EXPECT_THAT(ends[2].report, HasSubstr("rank 1"));
}

// The other workers are lost, and the stopped one goes on alone.
void stop_a_worker(std::int64_t staleness) {
  struct SharedState {
    test::Stopped victim;
    std::atomic<int> timeouts{0};
  };
  const test::Shared<SharedState> state;
  const JobShape shape{.workers = 3, .staleness = staleness, .timeout = std::chrono::seconds(4)};
  const auto ends = run_job(shape, [&](const JobContext& context) {
    auto w = make_weight();
    ParameterServer server({{"w", w}}, test::sgd(1), context.options);
    if (server.is_server()) {
      server.serve();
      EXPECT_EQ(server.stats().workers.at(3).updates, 2);
      return std::string();
    }
    w.mutable_grad() = torch::ones({1}, torch::kFloat64);
    server.step();
    if (context.rank == 3) {
      state->victim.stop();
      server.step();
      return std::string();
    }
    try {
      for (;;) server.step();
    } catch (const PeerError& error) {
      EXPECT_NE(dynamic_cast<const Timeout*>(&error), nullptr);
      EXPECT_THAT(error.ranks(), ::testing::ElementsAre(3));
      if (++state->timeouts == 2) state->victim.wake();
      return std::string(error.what());
    }
  });
  test::expect_clean(ends);
  for (const std::size_t worker : {1U, 2U}) {
    EXPECT_EQ(ends[worker].report,
              fmt::format("push: rank 3, which others wait for, made no step within the timeout of "
                          "4 s (rank {}'s ParameterServer was in push; pushes so far: {})",
                          worker, staleness + 1));
  }
}

TEST(LostProcesses, AStoppedWorkerIsNamedByThoseThatWaitForIt) {
  for (const std::int64_t staleness : {0, 3}) stop_a_worker(staleness);
}

TEST(LostProcesses, ServeThrowsIfAllWorkersWereLost) {
  const auto ends = run_job({.workers = 2}, [](const JobContext& context) {
    auto w = make_weight();
    ParameterServer server({{"w", w}}, test::sgd(1), context.options);
    if (!server.is_server()) ::raise(SIGKILL);
    try {
      server.serve();
    } catch (const PeerLost& error) {
      EXPECT_THAT(error.ranks(), ::testing::ElementsAre(1, 2));
      return std::string(error.what());
    }
    return std::string("serve returned");
  });
  EXPECT_THAT(ends[0].report, AllOf(HasSubstr("all workers were lost without having left"),
                                    HasSubstr("rank 1: "), HasSubstr("rank 2 was lost")));
}

TEST(LostProcesses, WorkersThatNeverComeAreGivenUpAfterTheTimeout) {
  const JobShape shape{.workers = 2, .timeout = std::chrono::milliseconds(300)};
  const auto ends = run_job(shape, [](const JobContext& context) {
    if (context.rank == 2) return std::string();
    auto w = make_weight();
    auto options = context.options;
    if (context.rank == 1) options.init.timeout = std::chrono::seconds(60);
    ParameterServer server({{"w", w}}, test::sgd(1), options);
    if (server.is_server()) {
      server.serve();
      return std::string();
    }
    w.mutable_grad() = -torch::ones({1}, torch::kFloat64);
    server.step();
    EXPECT_EQ(w.item<double>(), 1);
    return std::string();
  });
  test::expect_clean(ends);
}

TEST(LostProcesses, AWorkerThatComesAfterTheEndNamesTheServer) {
  const JobShape shape{.workers = 1, .replaced = {1}};
  const auto ends = run_job(shape, [](const JobContext& context) {
    auto w = make_weight();
    if (context.process == 2) {
      context.store->wait({"ended"});
      try {
        const ParameterServer late({{"w", w}}, test::sgd(1), context.options);
      } catch (const PeerLost& error) {
        EXPECT_THAT(error.ranks(), ::testing::ElementsAre(0));
        return std::string(error.what());
      }
      return std::string("no error");
    }
    ParameterServer server({{"w", w}}, test::sgd(1), context.options);
    if (server.is_server()) {
      server.serve();
      context.store->set("ended", "");
    }
    return std::string();
  });
  test::expect_clean(ends);
  EXPECT_THAT(ends[2].report, HasSubstr("rank 0, a server, has ended"));
}

}  // namespace
}  // namespace paceline
