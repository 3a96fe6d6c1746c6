// Workers that are killed at any moment, and new processes in their place.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "parallel/parameter_server/jobs.h"
#include "support/eventually.h"
#include "support/shared.h"
#include "support/thoroughness.h"

namespace paceline {
namespace {

using test::JobContext;
using test::JobShape;
using test::run_job;

constexpr int kMostWorkers = 4;

// Steps by a learning rate of 1. A worker's gradient is -1 at its own place, so the parameter
// counts the updates of each worker, however many made a step together.
class CountingSgd final : public torch::optim::SGD {
 public:
  explicit CountingSgd(std::vector<at::Tensor> parameters)
      : SGD(std::move(parameters), torch::optim::SGDOptions(1)) {}

  at::Tensor step(LossClosure /*closure*/ = nullptr) override {
    for (const auto& parameter : param_groups().front().params()) {
      auto& gradient = parameter.mutable_grad();
      const auto from = gradient != 0;
      const auto workers = from.sum().item<double>();
      EXPECT_TRUE(at::allclose(gradient, -from.to(at::kDouble) / workers)) << gradient;
      gradient.mul_(workers);
    }
    return SGD::step();
  }
};

// Of a worker, what its processes have begun to push and what they know to be applied.
struct Pushes {
  std::atomic<int> begun{0};
  std::atomic<int> done{0};
  std::atomic<bool> killed{false};    // the first process
  std::atomic<bool> finished{false};  // the one in its place
};
using AllPushes = std::array<Pushes, kMostWorkers>;

// Kills this process at a random moment.
void kill_at_random(unsigned seed, std::atomic<bool>& killed) {
  std::thread([seed, &killed] {
    constexpr unsigned kLongestUs = 60'000;
    std::mt19937 random(seed);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % kLongestUs));
    killed = true;
    ::kill(::getpid(), SIGKILL);
  }).detach();
}

std::string describe_counts(const ParameterServerStats& stats, const at::Tensor& counter,
                            const ParameterServerOptions& options) {
  std::string counts;
  for (int worker = 0; worker < kMostWorkers; ++worker) {
    const auto count = counter[worker].item<double>();
    counts += fmt::format("{} ", count);
    const auto its = stats.workers.find(worker + options.servers);
    if (its != stats.workers.end()) {
      EXPECT_EQ(its->second.updates, count);
    }
  }
  if (options.staleness.value_or(0) > 0) {
    EXPECT_LE(stats.largest_lead, *options.staleness);
  }
  return counts;
}

// Worker 0 goes on until the others have been killed, or those in their place have finished; the
// others until they are killed.
bool is_needed(const JobContext& context, const JobShape& shape, const AllPushes& pushes) {
  if (context.rank != shape.servers) return context.process == context.rank;
  for (std::size_t worker = 1; worker < static_cast<std::size_t>(shape.workers); ++worker) {
    const Pushes& its = pushes.at(worker);
    if (shape.replaced.empty() ? !its.killed : !its.finished) return true;
  }
  return false;
}

void step_and_count(ParameterServer& server, const std::function<bool(int)>& goes_on,
                    Pushes& pushes) {
  for (int step = 0; goes_on(step); ++step) {
    ++pushes.begun;
    server.step();
    ++pushes.done;
  }
  server.leave();
  pushes.finished = true;
}

std::string count_updates(const JobContext& context, const JobShape& shape, AllPushes& pushes,
                          unsigned seed) {
  constexpr int kSteps = 40;
  const auto options = torch::TensorOptions(torch::kFloat64).requires_grad(true);
  const int worker = context.rank - shape.servers;
  std::vector<at::Tensor> counters;
  NamedTensors named;
  for (int i = 0; i < shape.servers; ++i) {
    counters.push_back(torch::zeros({kMostWorkers}, options));
    counters.back().mutable_grad() = torch::zeros({kMostWorkers}, torch::kFloat64);
    if (worker >= 0) counters.back().mutable_grad()[worker] = -1;
    named.emplace_back(fmt::format("counter {}", i), counters.back());
  }
  if (context.process != context.rank) {
    const auto& killed = pushes.at(static_cast<std::size_t>(worker)).killed;
    EXPECT_TRUE(test::eventually([&] { return killed.load(); }));
  } else if (worker > 0) {
    kill_at_random(seed, pushes.at(static_cast<std::size_t>(worker)).killed);
  }
  auto server_options = context.options;
  // A worker that was killed before it came counts as lost after this time.
  if (worker < 0) server_options.init.timeout = std::chrono::seconds(5);
  ParameterServer server(
      named, [](auto parameters) { return std::make_unique<CountingSgd>(std::move(parameters)); },
      server_options);
  if (server.is_server()) {
    server.serve();
    return describe_counts(server.stats(), counters.at(static_cast<std::size_t>(context.rank)),
                           context.options);
  }
  step_and_count(
      server, [&](int step) { return step < kSteps || is_needed(context, shape, pushes); },
      pushes.at(static_cast<std::size_t>(worker)));
  return "";
}

void kill_workers(const JobShape& shape, unsigned seed) {
  SCOPED_TRACE(fmt::format("{} servers, {} workers, staleness {}, seed {}", shape.servers,
                           shape.workers, shape.staleness.value_or(-1), seed));
  const test::Shared<AllPushes> pushes;
  const auto ends = run_job(shape, [&](const JobContext& context) {
    return count_updates(context, shape, *pushes, seed * 8 + static_cast<unsigned>(context.rank));
  });
  for (std::size_t process = 0; process < ends.size(); ++process) {
    const auto& end = ends[process];
    const auto number = static_cast<int>(process);
    const bool survives = number <= shape.servers || number >= shape.size();
    EXPECT_TRUE(survives ? end.exited_cleanly() : end.killed()) << process << ": " << end.report;
  }
  for (int server = 0; server < shape.servers; ++server) {
    std::istringstream counts(ends[static_cast<std::size_t>(server)].report);
    for (std::size_t worker = 0; worker < static_cast<std::size_t>(shape.workers); ++worker) {
      int count = -1;
      counts >> count;
      EXPECT_GE(count, pushes->at(worker).done) << "worker " << worker;
      EXPECT_LE(count, pushes->at(worker).begun) << "worker " << worker;
    }
  }
}

class KilledWorkers : public ::testing::TestWithParam<std::optional<std::int64_t>> {};

TEST_P(KilledWorkers, LoseAndDoubleNoUpdate) {
  constexpr int kRounds = 6;
  for (unsigned seed = 0; seed < kRounds * static_cast<unsigned>(test::thoroughness()); ++seed) {
    const int servers = 1 + static_cast<int>(seed % 2);
    const int workers = 2 + static_cast<int>(seed % 3);
    kill_workers({.servers = servers, .workers = workers, .staleness = GetParam()}, seed);
    if (HasFailure()) return;
  }
}

TEST(LostProcesses, WorkersOnOtherNodesLoseAndDoubleNoUpdate) {
  for (unsigned seed = 0; seed < 2U * static_cast<unsigned>(test::thoroughness()); ++seed) {
    kill_workers({.servers = 1 + static_cast<int>(seed % 2),
                  .workers = 3,
                  .staleness = 0,
                  .two_nodes = true},
                 seed);
  }
}

// The processes that come in their place begin at a random moment, too.
TEST_P(KilledWorkers, AreReplacedWithoutLosingAnUpdate) {
  constexpr int kRounds = 4;
  for (unsigned seed = 0; seed < kRounds * static_cast<unsigned>(test::thoroughness()); ++seed) {
    const int servers = 1 + static_cast<int>(seed % 2);
    kill_workers({.servers = servers,
                  .workers = 3,
                  .staleness = GetParam(),
                  .replaced = {servers + 1, servers + 2}},
                 seed);
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, KilledWorkers,
                         ::testing::Values(std::optional<std::int64_t>(0),
                                           std::optional<std::int64_t>(3), std::nullopt),
                         [](const auto& mode) {
                           if (!mode.param) return std::string("Asynchronous");
                           return *mode.param == 0 ? std::string("Synchronous")
                                                   : fmt::format("Staleness{}", *mode.param);
                         });

}  // namespace
}  // namespace paceline
