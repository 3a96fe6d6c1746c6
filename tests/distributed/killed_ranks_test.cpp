// Ranks that are killed.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <functional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <paceline/all_reduce_algorithms.h>
#include <paceline/collectives.h>
#include <paceline/ddp.h>
#include <paceline/local_sgd.h>
#include <paceline/pipeline.h>

#include "base/deadline.h"
#include "shm/membership/bootstrap.h"
#include "support/cases.h"
#include "support/process_ranks.h"
#include "support/shared.h"
#include "support/temporary_directory.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

using namespace std::chrono_literals;
using test::RankContext;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

namespace fs = std::filesystem;

// Far more than it takes, for machines that have other things to do.
constexpr long kLate = 30'000;

// SIGKILL for this process at a point of CLOCK_MONOTONIC, whatever it is doing then.
void die_at(Clock::time_point when) {
  const auto ns = std::chrono::nanoseconds(when.time_since_epoch()).count();
  sigevent event{};
  event.sigev_notify = SIGEV_SIGNAL;
  event.sigev_signo = SIGKILL;
  timer_t timer{};
  itimerspec at{};
  at.it_value = {ns / 1'000'000'000, ns % 1'000'000'000};
  if (::timer_create(CLOCK_MONOTONIC, &event, &timer) != 0 ||
      ::timer_settime(timer, TIMER_ABSTIME, &at, nullptr) != 0) {
    throw std::runtime_error("no timer");
  }
}

// What is at hand and could be left behind by ranks: temporary files, descriptors, processes.
class Leftovers : public ::testing::Environment {
 public:
  void SetUp() override { ::setenv("TMPDIR", directory_.path().c_str(), 1); }

  std::set<std::string> find() const {
    std::set<std::string> found;
    for (const fs::path& directory : {directory_.path(), fs::path("/proc/self/fd")}) {
      for (const auto& entry : fs::directory_iterator(directory)) found.insert(entry.path());
    }
    for (const auto& entry : fs::directory_iterator("/dev/shm")) {
      if (entry.path().string().find("paceline") != std::string::npos) found.insert(entry.path());
    }
    if (::waitpid(-1, nullptr, WNOHANG) >= 0) found.insert("a child process");
    return found;
  }

 private:
  const test::TemporaryDirectory directory_;
};

Leftovers& leftovers() {
  static auto* const instance = new Leftovers;  // gtest's, which deletes it
  return *instance;
}
const auto* const environment = ::testing::AddGlobalTestEnvironment(&leftovers());

// Once all have joined, one rank is killed while all run `body` over and over; every other must
// name it in time.
void check_kill(int size, const std::function<void(const RankContext&)>& body) {
  const auto before = leftovers().find();
  const int victim = size / 2;
  const test::Shared<std::atomic<Clock::time_point>> death;
  const auto ends = test::run_torch_ranks(size, "paceline", [&](const RankContext& context) {
    try {
      const World world = init_process_group(context.init);
      barrier();
      if (context.rank == victim) {
        *death = Clock::now() + std::chrono::milliseconds(300);
        die_at(*death);
      }
      while (true) body(context);
    } catch (const PeerLost& error) {
      const auto late =
          std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - death->load())
              .count();
      EXPECT_EQ(error.ranks(), std::vector<int>{victim}) << error.what();
      return fmt::format("{} ms: {}", late, error.what());
    }
  });
  for (int rank = 0; rank < size; ++rank) {
    const auto& end = ends[static_cast<std::size_t>(rank)];
    if (rank == victim) {
      EXPECT_TRUE(end.killed());
      continue;
    }
    EXPECT_TRUE(end.exited_cleanly()) << end.report;
    EXPECT_LT(std::stol(end.report), kLate)
        << "rank " << rank << " of " << size << ": " << end.report;
    EXPECT_THAT(end.report, HasSubstr(fmt::format("rank {} was lost", victim)));
  }
  EXPECT_EQ(leftovers().find(), before);
}

using KilledRanks = test::SizeTest;
INSTANTIATE_TEST_SUITE_P(, KilledRanks, ::testing::Values(2, 3, 4, 8), test::CaseName());

TEST_P(KilledRanks, InAllReduceIsNamed) {
  check_kill(GetParam(), [](const RankContext&) {
    static const auto large = torch::ones({1 << 20});
    all_reduce(large);
  });
}

TEST_P(KilledRanks, InAsynchronousAllReduceIsNamed) {
  check_kill(GetParam(), [](const RankContext&) {
    static const auto large = torch::ones({1 << 20});
    all_reduce_async(large).wait();
  });
}

TEST_P(KilledRanks, InAlgorithmsOfAllReduceIsNamed) {
  for (const int servers : {0, 1, GetParam()}) {
    check_kill(GetParam(), [servers](const RankContext&) {
      static const auto large = torch::ones({1 << 20});
      servers == 0 ? ring_all_reduce(large) : parameter_server_all_reduce(large, servers);
    });
  }
}

TEST_P(KilledRanks, InBackwardIsNamed) {
  check_kill(GetParam(), [](const RankContext&) {
    static DistributedDataParallel model(
        torch::nn::Sequential(torch::nn::Linear(200, 800), torch::nn::Linear(800, 200)),
        {.bucket_cap_mb = 0.5});
    model(torch::ones({8, 200})).sum().backward();
  });
}

TEST_P(KilledRanks, InDdpConstructionIsNamed) {
  check_kill(GetParam(), [](const RankContext&) {
    const DistributedDataParallel model(torch::nn::Linear(300, 300));
  });
}

// Also by stages that exchange nothing with it.
TEST_P(KilledRanks, InAPipelineIsNamed) {
  check_kill(GetParam(), [](const RankContext&) {
    const auto loss = [](const at::Tensor& output, const at::Tensor& target) {
      return (output - target).square().mean();
    };
    static Pipeline pipeline(torch::nn::Linear(200, 200), loss, {.n_microbatches = 4});
    pipeline.step(torch::ones({8, 200}), torch::zeros({8, 200}));
  });
}

TEST_P(KilledRanks, InPostLocalSgdIsNamed) {
  check_kill(GetParam(), [](const RankContext&) {
    static DistributedDataParallel model(torch::nn::Linear(200, 200));
    static PeriodicModelAverager averager({.period = 2});
    static bool first = true;
    if (std::exchange(first, false)) {
      model.register_comm_hook(comm_hooks::post_local_sgd(comm_hooks::PostLocalSgdState(
          {.start_local_sgd_iter = 1, .post_local_gradient_all_reduce = false})));
    }
    model(torch::ones({8, 200})).sum().backward();
    averager.average_parameters(model.parameters());
  });
}

TEST(Killed, InAGroupIsNamedByGlobalRank) {
  const auto ends = test::run_torch_ranks(3, "paceline", [](const RankContext& context) {
    const World world = init_process_group(context.init);
    const ProcessGroup group = new_group({1, 2});
    barrier({.group = group});  // it is formed on both
    if (context.rank == 2) ::raise(SIGKILL);
    if (context.rank == 0) return std::string("no member");
    try {
      barrier({.group = group});
    } catch (const PeerLost& error) {
      EXPECT_THAT(error.ranks(), ::testing::ElementsAre(2));
      return std::string(error.what());
    }
    return std::string("no error");
  });
  EXPECT_THAT(ends[1].report, AllOf(HasSubstr("rank 2 was lost"), HasSubstr("of group 1")));
}

TEST(Killed, BeforeNewGroupIsNamed) {
  const auto ends = test::run_torch_ranks(3, "paceline", [](const RankContext& context) {
    const World world = init_process_group(context.init);
    barrier();
    if (context.rank == 1) ::raise(SIGKILL);
    try {
      static_cast<void>(new_group());
    } catch (const PeerLost& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  });
  for (const int rank : {0, 2}) {
    EXPECT_THAT(ends[static_cast<std::size_t>(rank)].report, HasSubstr("rank 1 was lost"));
  }
}

// Whatever the others are doing in new_group, they throw the same, also where exceptions of the
// first to find out end their Worlds.
TEST(Killed, AtAnyTimeInNewGroupIsNamed) {
  constexpr int kSize = 4;
  for (int run = 0; run < 24; ++run) {
    const int victim = run % kSize;
    const auto ends = test::run_torch_ranks(kSize, "paceline", [&](const RankContext& context) {
      try {
        const World world = init_process_group(context.init);
        barrier();
        if (context.rank == victim) die_at(Clock::now() + std::chrono::microseconds(700 * run));
        while (true) destroy_process_group(new_group());
      } catch (const PeerError& error) {
        EXPECT_EQ(error.ranks(), std::vector<int>{victim}) << error.what();
        return std::string(error.what());
      }
    });
    const std::string& first = ends[victim == 0 ? 1 : 0].report;
    EXPECT_THAT(first, HasSubstr(fmt::format("rank {} was lost (its process ", victim)));
    for (int rank = 0; rank < kSize; ++rank) {
      if (rank == victim) continue;
      const auto& end = ends[static_cast<std::size_t>(rank)];
      EXPECT_TRUE(end.exited_cleanly()) << end.report;
      EXPECT_EQ(end.report, first) << "rank " << rank;
    }
  }
}

// BootstrapSockets lead to each other as under `paceline run`, where a death before joining shows
// too.
TEST_P(KilledRanks, BeforeItsHelloIsNamed) {
  const int size = GetParam();
  const int victim = size - 1;
  const auto ends =
      test::run_process_ranks(size, [&](int rank, shm::BootstrapSockets sockets) -> std::string {
        if (rank == victim) ::raise(SIGKILL);
        try {
          shm::join(std::move(sockets), rank, size, {4096, 4096}, base::Deadline::after(60s), {});
          return "joined";
        } catch (const PeerLost& error) {
          EXPECT_EQ(error.ranks(), std::vector<int>{victim});
          return error.what();
        }
      });
  for (int rank = 0; rank < victim; ++rank) {
    EXPECT_EQ(ends[static_cast<std::size_t>(rank)].report,
              fmt::format("rank {} was lost while the group was being formed", victim));
  }
}

}  // namespace
}  // namespace paceline
