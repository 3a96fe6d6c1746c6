#include <gtest/gtest.h>
#include <torch/torch.h>

#include <paceline/ddp.h>

#include "parallel/ddp/steps.h"
#include "support/cases.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

using test::backends;
using test::expect_torch_ranks;

using BuffersBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, BuffersBackends, ::testing::ValuesIn(backends()), test::CaseName());

TEST_P(BuffersBackends, AllowAForwardInEvalModeOnOneRank) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    DistributedDataParallel model(torch::nn::BatchNorm1d(3));
    const auto x = torch::randn({5, 3});
    for (int step = 0; step < 3; ++step) {
      if (rank == 0) {
        model.eval();
        static_cast<void>(model(x));
        model.train();
      }
      model(x).pow(2).sum().backward();
    }
  });
}

TEST_P(BuffersBackends, MayBeCopiedBetweenTwoForwardsOfOneBackward) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    torch::nn::BatchNorm1d norm(3);
    DistributedDataParallel model(norm);
    const auto x = torch::randn({5, 3}) + rank;
    for (int step = 0; step < 2; ++step) {
      const auto first = model(x);
      norm->running_mean.data().fill_(rank + 1);  // without a trace for autograd
      const auto second = model(2 * x);
      (first + second).pow(2).sum().backward();
      EXPECT_NEAR(norm->running_mean[0].item<float>(),
                  0.9 + 0.1 * 2 * x.select(1, 0).mean().item<float>(), 1e-5)
          << "rank 0's value of 1, then this rank's batch";
    }
  });
}

TEST_P(BuffersBackends, AreCopiedBeforeTheFirstForward) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    torch::nn::BatchNorm1d norm(torch::nn::BatchNorm1dOptions(3).momentum(0.0));
    norm->running_mean.fill_(rank + 1);
    DistributedDataParallel model(norm, {.init_sync = false});
    EXPECT_EQ(norm->running_mean[0].item<float>(), rank + 1);
    static_cast<void>(model(torch::randn({5, 3})));
    EXPECT_EQ(norm->running_mean[0].item<float>(), 1);
  });
}

TEST_P(BuffersBackends, FollowRankZeroByPyTorchsRule) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    for (const bool broadcast_buffers : {true, false}) {
      torch::nn::BatchNorm1d norm(3);
      norm->running_mean.fill_(rank);
      DistributedDataParallel model(norm, {.broadcast_buffers = broadcast_buffers});
      EXPECT_EQ(norm->running_mean[0].item<float>(), 0) << "construction makes them equal";

      const auto x = torch::randn({5, 3}) + rank;
      const auto step = [&](bool sync) {
        const auto guard = model.no_sync(!sync);
        model(x).pow(2).sum().backward();
      };
      norm->running_mean.fill_(rank);
      step(true);
      norm->running_mean.fill_(rank);
      {
        const at::NoGradGuard no_grad;
        model.eval();
        static_cast<void>(model(x));
        model.train();
      }
      EXPECT_EQ(norm->running_mean[0].item<float>(), rank) << "not with grad mode off";
      norm->options.momentum(0.0);
      step(false);  // the step before was synchronised
      EXPECT_EQ(norm->running_mean[0].item<float>(), broadcast_buffers ? 0 : rank);
      norm->running_mean.fill_(rank);
      step(true);  // the step before was not
      EXPECT_EQ(norm->running_mean[0].item<float>(), rank);
    }
  });
}

}  // namespace
}  // namespace paceline
