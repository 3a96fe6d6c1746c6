#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <stdexcept>

#include <paceline/ddp.h>
#include <paceline/error.h>

#include "support/small_net.h"
#include "support/torch_ranks.h"
#include "support/worlds.h"

namespace paceline {
namespace {

using test::batch_of;
using test::expect_same_gradients;
using test::expect_torch_ranks;
using test::loss_of;
using test::make_net;
using test::whole_batch_gradients;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// A backward that reaches this tensor throws.
void throw_at(const torch::Tensor& tensor) {
  tensor.register_hook(
      [](const torch::Tensor&) -> torch::Tensor { throw std::runtime_error("bad grad"); });
}

using ThrownInBackwardWorldsUpTo8 = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, ThrownInBackwardWorldsUpTo8, test::worlds({2, 3, 8}), test::CaseName());

TEST_P(ThrownInBackwardWorldsUpTo8, OnAllRanksTrainingGoesOn) {
  expect_torch_ranks(GetParam(), [](int rank, int n) {
    DistributedDataParallel model(make_net(at::kDouble), {.bucket_cap_mb = 0.0001});
    for (int step = 0; step < 4; ++step) {
      model.module()->zero_grad();
      const auto x = batch_of(rank, step, at::kDouble);
      if (step % 2 == 0) {
        const auto hidden = torch::tanh(model.module()->first(x));
        throw_at(hidden);
        static_cast<void>(model(x));  // arms the step
        const auto output = model.module()->last(torch::tanh(model.module()->second(hidden)));
        EXPECT_THROW(loss_of(output, x).backward(), std::exception);
        continue;
      }
      loss_of(model(x), x).backward();
      expect_same_gradients(model.parameters(), whole_batch_gradients(step, n));
    }
  });
}

// Rank 1's backward throws when some of its buckets are published; the others learn of it and all
// go on, whatever zero_grad does.
TEST_P(ThrownInBackwardWorldsUpTo8, OnOneRankTrainingGoesOn) {
  expect_torch_ranks(GetParam(), [](int rank, int n) {
    DistributedDataParallel model(make_net(at::kDouble), {.bucket_cap_mb = 0.0001});
    for (int step = 0; step < 6; ++step) {
      const auto x = batch_of(rank, step, at::kDouble);
      if (step % 2 == 0) {
        static_cast<void>(model(x));  // arms the step
        const auto hidden = torch::tanh(model.module()->first(x));
        if (rank == 1) throw_at(hidden);
        const auto output = model.module()->last(torch::tanh(model.module()->second(hidden)));
        EXPECT_THROW(loss_of(output, x).backward(), std::exception) << "rank " << rank;
        model.module()->zero_grad(step % 4 == 0);
        continue;
      }
      loss_of(model(x), x).backward();
      expect_same_gradients(model.parameters(), whole_batch_gradients(step, n));
      model.module()->zero_grad(false);
    }
  });
}

using ThrownInBackwardBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, ThrownInBackwardBackends, test::backends_and_nodes(), test::CaseName());

TEST_P(ThrownInBackwardBackends, TheNextBackwardNeedsAForward) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    DistributedDataParallel model(make_net(at::kDouble), {.bucket_cap_mb = 0.0001});
    const auto x = batch_of(rank, 0, at::kDouble);
    static_cast<void>(model(x));
    const auto hidden = torch::tanh(model.module()->first(x));
    throw_at(hidden);
    const auto loss = model.module()->last(torch::tanh(model.module()->second(hidden))).sum();
    EXPECT_ANY_THROW(loss.backward({}, /*retain_graph=*/true));
    EXPECT_THAT([&] { loss.backward(); },
                ThrowsMessage<UsageError>(HasSubstr("run a forward before the next")));
    model(x).sum().backward();
  });
}

}  // namespace
}  // namespace paceline
