#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <thread>

#include <paceline/ddp.h>

#include "support/cases.h"
#include "support/eventually.h"
#include "support/shared.h"
#include "support/small_net.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

using test::backends;
using test::batch_of;
using test::expect_torch_ranks;
using test::loss_of;
using test::make_net;

using DdpStatsBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, DdpStatsBackends, ::testing::ValuesIn(backends()), test::CaseName());

TEST_P(DdpStatsBackends, ContainTheTimesOfAStep) {
  const test::Shared<std::atomic<int>> begun;  // backwards, on rank 0
  expect_torch_ranks(2, GetParam(), [&](int rank, int /*size*/) {
    DistributedDataParallel model(make_net(at::kDouble), {.bucket_cap_mb = 0.004});
    constexpr std::chrono::milliseconds kSlow(200);
    for (int step = 0; step < 3; ++step) {
      const auto x = batch_of(rank, step, at::kDouble);
      const auto output = model(x);
      model.module()->zero_grad();
      if (rank == 0) {
        ++*begun;
      } else {
        EXPECT_TRUE(test::eventually([&] { return *begun > step; }));
        // The input of this test, and part of rank 1's backward: three times kSlow. The statistics
        // must show a third of it, so a rank 0 that begins its waits late does not fail.
        std::this_thread::sleep_for(kSlow);
      }
      loss_of(output, x).backward();
    }
    const DdpStats& stats = model.stats();
    EXPECT_EQ(stats.steps, 3u);
    std::size_t bytes = 0;
    for (const auto& parameter : model.parameters()) bytes += parameter.nbytes();
    EXPECT_GE(stats.last.bytes, bytes);
    EXPECT_LE(stats.last.bytes, bytes + 64 * model.parameters().size());
    EXPECT_EQ(stats.last.copied, bytes);
    EXPECT_GT(stats.last.buckets, 1u);
    EXPECT_EQ(stats.total.buckets, 3 * stats.last.buckets);
    EXPECT_GT(stats.last.forward.count(), 0);
    EXPECT_GE(stats.last.communication, stats.last.overlap);
    EXPECT_GE(stats.last.communication, stats.last.waiting);
    EXPECT_GE(stats.hidden(), 0);
    EXPECT_LE(stats.hidden(), 1);
    // Nothing but the other rank's sleep makes one wait so long.
    EXPECT_GT(rank == 0 ? stats.total.waiting : stats.total.backward, kSlow);
  });
}

}  // namespace
}  // namespace paceline
