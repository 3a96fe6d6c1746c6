#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/error.h>

#include "support/cases.h"
#include "support/torch_ranks.h"
#include "support/worlds.h"

namespace paceline {
namespace {

using namespace std::chrono_literals;
using test::expect_torch_ranks;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(MonitoredBarrier, RejectsNegativeTimeout) {
  expect_torch_ranks(1, "paceline", [](int, int) {
    EXPECT_THROW(monitored_barrier({.timeout = -1ms}), UsageError);
  });
}

using MonitoredBarrierWorlds = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, MonitoredBarrierWorlds, test::worlds({4}), test::CaseName());

// They come together again over another backend.
TEST_P(MonitoredBarrierWorlds, NamesAllMissingRanks) {
  expect_torch_ranks(GetParam(), [](int rank, int size) {
    monitored_barrier();
    const auto others = new_group({}, {.backend = "gloo"});
    if (rank == 0) {
      std::string missing = "1";
      for (int one = 2; one < size; ++one) missing += ", " + std::to_string(one);
      EXPECT_THAT([] { monitored_barrier({.timeout = 100ms, .wait_all_ranks = true}); },
                  ThrowsMessage<Error>(HasSubstr("Ranks " + missing +
                                                 " failed to pass monitoredBarrier in 100 ms")));
    }
    barrier({.group = others});
  });
}

using MonitoredBarrierOwnWorlds = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, MonitoredBarrierOwnWorlds,
                         ::testing::Values("paceline", test::kAcrossNodes), test::CaseName());

// What a rank throws that comes to the barrier.
std::vector<int> missing_of(std::chrono::milliseconds timeout, bool wait_all_ranks = false) {
  try {
    monitored_barrier({.timeout = timeout, .wait_all_ranks = wait_all_ranks});
  } catch (const Timeout& error) {
    EXPECT_EQ(error.operation(), "monitored_barrier");
    return error.ranks();
  }
  return {};
}

TEST_P(MonitoredBarrierOwnWorlds, NamesAMissingRankAndLeavesTheGroupUsable) {
  expect_torch_ranks(5, GetParam(), [](int rank, int) {
    const auto others = new_group({}, {.backend = "gloo"});
    const auto pass = [] {
      monitored_barrier();
      auto t = torch::ones({2});
      all_reduce(t);
      EXPECT_EQ(t[0].item<float>(), 5);
    };
    pass();
    if (rank == 0) {
      EXPECT_THAT(missing_of(50ms), ElementsAre(1));
    }
    barrier({.group = others});
    if (rank != 0) {  // they come too late
      EXPECT_THAT([] { monitored_barrier({.timeout = 20s}); },
                  ThrowsMessage<Timeout>(HasSubstr("but received errors while waiting for "
                                                   "send/recv from rank 0")));
    }
    pass();
    // All that came hear who is missing, and so do the others, even after a further one.
    if (rank % 2 == 0) {
      EXPECT_THAT(missing_of(rank == 0 ? 2s : 20s, true), ElementsAre(1, 3));
    }
    barrier({.group = others});
    if (rank == 0) {
      EXPECT_THAT(missing_of(0ms), ElementsAre(1));
    }
    barrier({.group = others});
    for (int late = rank == 0 ? 2 : rank % 2 == 0 ? 1 : 0; late < 2; ++late) {
      EXPECT_THAT(missing_of(20s), ElementsAre(1));
    }
    pass();
  });
}

TEST_P(MonitoredBarrierOwnWorlds, ALateRank0NamesTheMissingRankToTheOthers) {
  expect_torch_ranks(3, GetParam(), [](int rank, int) {
    const auto others = new_group({}, {.backend = "gloo"});
    if (rank == 0) std::this_thread::sleep_for(2s);
    if (rank != 2) {
      EXPECT_THAT(missing_of(rank == 0 ? 4s : 5s), ElementsAre(2));
    }
    barrier({.group = others});
    if (rank == 2) {
      EXPECT_THAT(missing_of(20s), ElementsAre(2));
    }
    EXPECT_THAT(missing_of(20s), ElementsAre());
  });
}

// Rank 0 does not come, and then a rank that is on another node in a group across nodes.
TEST_P(MonitoredBarrierOwnWorlds, EndsWhenARankDoesNotCome) {
  expect_torch_ranks(3, GetParam(), [](int rank, int) {
    const auto others = new_group({}, {.backend = "gloo"});
    for (const int missing : {0, 2}) {
      const auto group = new_group();
      if (rank != missing) {
        try {
          // Without rank 0, nobody ends the others' wait.
          monitored_barrier({.group = group, .timeout = rank == 0 || missing == 0 ? 200ms : 20s});
          ADD_FAILURE() << "rank " << missing << " came";
        } catch (const Timeout& error) {
          EXPECT_THAT(error.ranks(), ElementsAre(missing));
        }
      }
      barrier({.group = others});
    }
  });
}

}  // namespace
}  // namespace paceline
