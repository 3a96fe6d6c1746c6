#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <memory>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/ddp.h>

#include "support/cases.h"
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

struct LayersImpl : torch::nn::Module {
  explicit LayersImpl(bool backwards) {
    if (!backwards) register_module("first", first);
    register_module("last", last);
    if (backwards) register_module("first", first);
  }
  torch::Tensor forward(const torch::Tensor& x) { return last(torch::tanh(first(x))); }
  torch::nn::Linear first{9, 33};
  torch::nn::Linear last{33, 2};
};

// However they were registered.
TEST(Ddp, BucketsFollowTheOrderOfArrival) {
  for (const bool backwards : {false, true}) {
    for (const bool is_static : {false, true}) {
      expect_torch_ranks(2, "paceline", [=](int, int) {
        auto net = std::make_shared<LayersImpl>(backwards);
        DistributedDataParallel model(net, {.bucket_cap_mb = 0.0001, .static_graph = is_static});
        std::vector<const void*> order;
        model.register_comm_hook([&](GradBucket& bucket) {
          for (const auto& one : bucket.getParameters()) order.push_back(one.unsafeGetTensorImpl());
          return comm_hooks::all_reduce()(bucket);
        });
        for (int step = 0; step < 2; ++step) {
          order.clear();
          model(torch::ones({1, 9})).sum().backward();
        }
        const auto of = [](const torch::nn::Linear& layer) {
          return std::vector<const void*>{layer->weight.unsafeGetTensorImpl(),
                                          layer->bias.unsafeGetTensorImpl()};
        };
        ASSERT_EQ(order.size(), 4U);
        const auto half = order.begin() + 2;
        EXPECT_THAT(std::vector(order.begin(), half),
                    ::testing::UnorderedElementsAreArray(of(net->last)));
        EXPECT_THAT(std::vector(half, order.end()),
                    ::testing::UnorderedElementsAreArray(of(net->first)));
      });
    }
  }
}

TEST(Ddp, NewBucketsKeepGradients) {
  expect_torch_ranks(2, "paceline", [](int rank, int n) {
    const auto make = [] {
      torch::manual_seed(1);
      auto net = std::make_shared<LayersImpl>(true);
      net->to(torch::kDouble);
      return net;
    };
    DistributedDataParallel model(make(), {.bucket_cap_mb = 0.0001});
    auto plain = make();
    // Accumulation, local steps and views across the rebuild, all at once.
    for (int step = 0; step < 6; ++step) {
      if (step % 4 == 3) {
        model.module()->zero_grad(step == 3);
        plain->zero_grad(step == 3);
      }
      {
        const auto guard = model.no_sync(step % 3 == 1);
        const auto x = batch_of(rank, step, at::kDouble);
        loss_of(model(x), x).backward();
      }
      for (int r = 0; r < n; ++r) {
        const auto x = batch_of(r, step, at::kDouble);
        (loss_of(plain->forward(x), x) / n).backward();
      }
      if (step % 3 != 1) expect_same_gradients(model.parameters(), plain->parameters());
    }
  });
}

using BucketOrderBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, BucketOrderBackends, test::backends_and_nodes(), test::CaseName());

// The order of arrival is that of the first step, whatever follows it before the next forward.
TEST_P(BucketOrderBackends, IsFoundAfterASecondBackwardThroughTheFirstForward) {
  expect_torch_ranks(2, GetParam(), [](int rank, int n) {
    DistributedDataParallel model(make_net(at::kDouble), {.bucket_cap_mb = 0.001});
    const auto first = batch_of(rank, 0, at::kDouble);
    const auto output = model(first);
    loss_of(output, first).backward({}, /*retain_graph=*/true);
    output.sum().backward();
    model.module()->zero_grad();
    const auto x = batch_of(rank, 1, at::kDouble);
    loss_of(model(x), x).backward();
    expect_same_gradients(model.parameters(), test::whole_batch_gradients(1, n));
  });
}

}  // namespace
}  // namespace paceline
