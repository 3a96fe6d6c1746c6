#include <paceline/preemption.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <csignal>

#include <paceline/error.h>

#include "support/torch_ranks.h"
#include "support/worlds.h"

namespace paceline {
namespace {

using test::expect_torch_ranks;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

using PreemptionWorlds = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, PreemptionWorlds, test::worlds(), test::CaseName());

TEST_P(PreemptionWorlds, IsSeenByAllRanksAtTheSameStep) {
  expect_torch_ranks(GetParam().size, GetParam().backend, [](int rank, int size) {
    Preemption preemption;
    for (int step = 0; step < 5; ++step) {
      if (rank == size - 1 && step == 2) std::raise(SIGUSR1);
      EXPECT_EQ(preemption.requested(), step >= 2) << step;
    }
  });
}

int calls = 0;

TEST(Preemption, GivesTheHandlersBack) {
  expect_torch_ranks(1, "paceline", [](int, int) {
    std::signal(SIGUSR2, [](int) { ++calls; });
    std::signal(SIGHUP, SIG_IGN);
    {
      Preemption preemption({.signals = {{SIGUSR2, SIGHUP}}});
      std::raise(SIGHUP);
      EXPECT_FALSE(preemption.requested()) << "it is ignored, as under nohup";
      std::raise(SIGUSR2);
      EXPECT_TRUE(preemption.requested());
      EXPECT_EQ(calls, 0);
    }
    std::raise(SIGUSR2);
    EXPECT_EQ(calls, 0) << "the process ends because of the first one";
    {
      std::signal(SIGUSR2, [](int) { ++calls; });
      const Preemption preemption({.signals = {{SIGUSR2, SIGHUP}}});
      EXPECT_THAT([] { const Preemption second; }, ThrowsMessage<UsageError>(HasSubstr("one in")));
    }
    std::raise(SIGUSR2);
    EXPECT_EQ(calls, 1);
    EXPECT_THAT(
        [] {
          const Preemption refused({.signals = {{SIGUSR2, SIGKILL}}});
        },
        ThrowsMessage<UsageError>(HasSubstr("SIGKILL cannot be handled")));
    std::raise(SIGUSR2);
    EXPECT_EQ(calls, 2);
    Preemption again;
    EXPECT_FALSE(again.requested());
  });
}

}  // namespace
}  // namespace paceline
