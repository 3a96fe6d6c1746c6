#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <iterator>
#include <optional>
#include <string>
#include <utility>

#include <paceline/collectives.h>
#include <paceline/error.h>
#include <paceline/sampler.h>

#include "support/cases.h"
#include "support/eventually.h"
#include "support/temporary_directory.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

using test::backends;
using test::expect_torch_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

int free_port() {
  const c10d::TCPStoreOptions options{.port = 0, .isServer = true, .waitWorkers = false};
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options)->getPort();
}

TEST(World, OfOneNeedsNoEnvironment) {
  expect_torch_ranks(1, "paceline", [](int, int) {
    destroy_process_group();
    EXPECT_FALSE(is_initialized());
    const World world = init_process_group();
    auto t = torch::ones({2});
    all_reduce(t);
    EXPECT_EQ(t.sum().item<float>(), 2);
    EXPECT_EQ(get_world_size(), 1);
    EXPECT_EQ(get_backend(), "paceline");
    EXPECT_THROW(static_cast<void>(init_process_group()), UsageError);
  });
}

TEST(World, OfAnUnknownBackendListsTheBackends) {
  const auto ends = test::run_torch_ranks(1, "nncl", [](const test::RankContext& context) {
    try {
      const World world = init_process_group(context.init);
    } catch (const UsageError& error) {
      return std::string(error.what());
    }
    return std::string();
  });
  EXPECT_THAT(ends[0].report, AllOf(HasSubstr("backend 'nncl' is not in this build"),
                                    HasSubstr("paceline"), Not(HasSubstr("hierarchical"))));
}

// Such as survivors of a lost rank do.
TEST(World, AnObjectEndsOnlyItsOwn) {
  const test::TemporaryDirectory directory;
  expect_torch_ranks(2, "paceline", [&](int rank, int size) {
    int number = 0;
    const auto form = [&] {
      const auto path = directory.path() / std::to_string(number++);
      return init_process_group(
          {.init_method = "file://" + path.string(), .world_size = size, .rank = rank});
    };
    destroy_process_group();
    World world = form();
    destroy_process_group();
    world = form();
    barrier();
    destroy_process_group();
    std::optional<World> other(form());
    destroy_process_group();
    other.emplace(form());
    barrier();
    { const World ended = std::move(world); }
    barrier();
  });
}

TEST(World, FormsWhateverItsRanksWereInBefore) {
  const test::TemporaryDirectory directory;
  expect_torch_ranks(2, "paceline", [&](int rank, int size) {
    destroy_process_group();
    if (rank == 0) const World alone = init_process_group({.world_size = 1, .rank = 0});
    const World world =
        init_process_group({.init_method = "file://" + (directory.path() / "shared").string(),
                            .timeout = test::kTestTimeout,
                            .world_size = size,
                            .rank = rank});
    barrier();
  });
}

// Each store has descriptors and a thread.
TEST(World, StoresOfEarlierWorldsEnd) {
  expect_torch_ranks(1, "paceline", [](int, int) {
    destroy_process_group();
    const auto open = [] {
      using Iterator = std::filesystem::directory_iterator;
      return std::distance(Iterator("/proc/self/fd"), Iterator());
    };
    std::ptrdiff_t after_three = 0;
    for (int number = 1; number <= 8; ++number) {
      const int port = free_port();
      const World world = init_process_group(
          {.init_method = fmt::format("tcp://127.0.0.1:{}", port), .world_size = 1, .rank = 0});
      if (number == 3) after_three = open();
      if (number > 3) {
        EXPECT_LE(open(), after_three + 2);
      }
    }
  });
}

TEST(World, AStoreThatIsUsedAgainIsNewerThanThoseBetween) {
  expect_torch_ranks(1, "paceline", [](int, int) {
    destroy_process_group();
    const auto form = [](int port) {
      const World world = init_process_group(
          {.init_method = fmt::format("tcp://127.0.0.1:{}", port), .world_size = 1, .rank = 0});
    };
    const int again = free_port();
    form(again);
    form(free_port());
    form(again);
    form(free_port());
    c10d::TCPStoreOptions options;
    options.port = static_cast<std::uint16_t>(again);
    options.timeout = std::chrono::seconds(1);
    EXPECT_NO_THROW(c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options));
  });
}

using WorldBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, WorldBackends, ::testing::ValuesIn(backends()), test::CaseName());

TEST_P(WorldBackends, CanBeFormedAgainOverTcpAndFile) {
  const std::string path = ::testing::TempDir() + "store." + std::to_string(::getpid());
  expect_torch_ranks(3, GetParam(), [&](int rank, int size) {
    // Rank 0 finds a free port and tells the others through the first world.
    const auto port = torch::zeros({1}, at::kLong);
    if (rank == 0) port.fill_(free_port());
    broadcast(port);
    barrier();
    destroy_process_group();
    const std::string number = std::to_string(port.item<std::int64_t>());
    // Two names of one address, where rank 0 listens already.
    for (const std::string& method :
         {"tcp://127.0.0.1:" + number, "tcp://127.1:" + number, "file://" + path}) {
      const World world = init_process_group({.backend = GetParam(),
                                              .init_method = method,
                                              .timeout = std::chrono::milliseconds::max(),
                                              .world_size = size,
                                              .rank = rank});
      auto t = torch::ones({2});
      all_reduce(t);
      EXPECT_EQ(t[0].item<float>(), 3);
      barrier();
    }
  });
  ::unlink(path.c_str());
}

TEST(World, GivesASamplerItsRankAndSize) {
  expect_torch_ranks(3, "paceline", [](int rank, int size) {
    EXPECT_EQ(data::DistributedSampler(10).indices(),
              data::DistributedSampler(10, {.num_replicas = size, .rank = rank}).indices());
    EXPECT_NE(
        data::DistributedSampler(10).indices(),
        data::DistributedSampler(10, {.num_replicas = size, .rank = (rank + 1) % size}).indices());
  });
}

}  // namespace
}  // namespace paceline
