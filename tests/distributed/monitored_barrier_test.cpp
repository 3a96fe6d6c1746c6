#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>

#include <paceline/collectives.h>
#include <paceline/error.h>

#include "support/cases.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

using namespace std::chrono_literals;
using test::backends;
using test::expect_torch_ranks;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(MonitoredBarrier, RejectsNegativeTimeout) {
  expect_torch_ranks(1, "paceline", [](int, int) {
    EXPECT_THROW(monitored_barrier({.timeout = -1ms}), UsageError);
  });
}

using MonitoredBarrierBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, MonitoredBarrierBackends, ::testing::ValuesIn(backends()),
                         test::CaseName());

TEST_P(MonitoredBarrierBackends, NamesAllMissingRanks) {
  expect_torch_ranks(4, GetParam(), [](int rank, int) {
    monitored_barrier();
    const auto world = new_group({}, {.backend = "gloo"});  // to come together again
    if (rank == 0) {
      EXPECT_THAT([] { monitored_barrier({.timeout = 100ms, .wait_all_ranks = true}); },
                  ThrowsMessage<Error>(
                      HasSubstr("Ranks 1, 2, 3 failed to pass monitoredBarrier in 100 ms")));
    }
    barrier({.group = world});
  });
}

TEST(MonitoredBarrier, NamesAMissingRankAndLeavesTheGroupUsable) {
  expect_torch_ranks(3, "paceline", [](int rank, int) {
    const auto gloo = new_group({}, {.backend = "gloo"});
    if (rank == 0) {
      try {
        monitored_barrier({.timeout = 50ms});
        ADD_FAILURE() << "nobody came";
      } catch (const Timeout& error) {
        EXPECT_THAT(error.ranks(), ElementsAre(1));
      }
    }
    barrier({.group = gloo});
    if (rank != 0) {  // they come too late
      EXPECT_THAT([] { monitored_barrier({.timeout = 20s}); },
                  ThrowsMessage<Timeout>(HasSubstr("but received errors while waiting for "
                                                   "send/recv from rank 0")));
    }
    monitored_barrier();
    auto t = torch::ones({2});
    all_reduce(t);
    EXPECT_EQ(t[0].item<float>(), 3);
  });
}

}  // namespace
}  // namespace paceline
