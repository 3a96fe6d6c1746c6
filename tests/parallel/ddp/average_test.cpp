#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <vector>

#include <paceline/collectives.h>
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
using test::kTinyBucket;
using test::loss_of;
using test::make_net;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// Gradients of the mean loss over all samples, from one process.
std::vector<torch::Tensor> gradients_of_all(const std::vector<torch::Tensor>& batches) {
  auto net = make_net(at::kDouble);
  const auto x = torch::cat(batches);
  loss_of(net(x), x).backward();
  return net->parameters();
}

torch::Tensor uneven_batch(int rank, int step) {
  return batch_of(rank, step, at::kDouble).narrow(0, 0, 1 + (rank + step) % 5);
}

using DdpAverageWorlds = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, DdpAverageWorlds, test::worlds(), test::CaseName());

TEST_P(DdpAverageWorlds, OverSamplesIsTheGradientOfTheWholeBatch) {
  expect_torch_ranks(GetParam(), [](int rank, int n) {
    DistributedDataParallel model(make_net(at::kDouble),
                                  {.bucket_cap_mb = kTinyBucket, .average = Average::samples});
    for (int step = 0; step < 4; ++step) {
      model.module()->zero_grad();
      std::vector<torch::Tensor> all;
      for (int r = 0; r < n; ++r) all.push_back(uneven_batch(r, step));
      // In the third step rank 0 has nothing, and a loss that is not a number.
      const bool idle = step == 2 && rank == 0 && n > 1;
      if (step == 2 && n > 1) all.erase(all.begin());
      const auto x = idle ? torch::empty({0, 9}, at::kDouble) : uneven_batch(rank, step);
      model.set_samples(static_cast<double>(x.size(0)));
      loss_of(model(x), x).backward();
      expect_same_gradients(model.parameters(), gradients_of_all(all));
    }
  });
}

// Of losses that are sums over samples. Each rank runs `leaves` micro-batches of its own.
void expect_sums(int rank, int leaves, int all_leaves, DdpOptions options) {
  options.average = Average::sum;
  const auto loss_sum = [](const torch::Tensor& output, const torch::Tensor& x) {
    return loss_of(output, x) * x.size(0);
  };
  torch::nn::Embedding table(torch::nn::EmbeddingOptions(8, 2).sparse(true));
  DistributedDataParallel sparse(table, options);
  DistributedDataParallel model(make_net(at::kDouble), options);
  for (int step = 0; step < 3; ++step) {
    model.module()->zero_grad();
    table->zero_grad();
    auto net = make_net(at::kDouble);
    for (int leaf = 0; leaf < all_leaves; ++leaf) {
      const auto x = uneven_batch(leaf, step);
      loss_sum(net(x), x).backward();
    }
    const auto run = [&](int leaf) {
      const auto x = uneven_batch(leaf, step);
      loss_sum(model(x), x).backward();
    };
    const auto look_up = [&](int leaf) { sparse(torch::tensor({leaf, 7})).sum().backward(); };
    if (options.logical_ranks == 0) {
      run(rank);
      look_up(rank);
    } else {
      EXPECT_EQ(model.logical_ranks().range().count, leaves);
      for (const int leaf : model.logical_ranks()) run(leaf);
      for (const int leaf : sparse.logical_ranks()) look_up(leaf);
    }
    expect_same_gradients(model.parameters(), net->parameters());
    const auto grad = table->weight.grad().to_dense();
    for (int row = 0; row < 7; ++row) {
      EXPECT_TRUE(grad[row].equal(torch::full({2}, row < all_leaves ? 1.0 : 0.0))) << row;
    }
    EXPECT_TRUE(grad[7].equal(torch::full({2}, all_leaves + (all_leaves == 8 ? 1.0 : 0.0))));
  }
}

TEST_P(DdpAverageWorlds, SumIsTheGradientOfTheSum) {
  expect_torch_ranks(GetParam(), [](int rank, int n) {
    for (const bool zero_copy : {true, false}) {
      expect_sums(rank, 1, n, {.bucket_cap_mb = kTinyBucket, .zero_copy = zero_copy});
    }
  });
}

TEST(DdpAverage, SumIsThatOfLogicalRanks) {
  for (const char* const backend : {"paceline", "gloo"}) {
    for (const int ranks : {1, 2, 4}) {
      expect_torch_ranks(ranks, backend, [](int rank, int n) {
        expect_sums(rank, 4 / n, 4, {.bucket_cap_mb = kTinyBucket, .logical_ranks = 4});
      });
    }
  }
}

TEST(DdpAverage, RejectsAStepWithoutSetSamples) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    DistributedDataParallel model(make_net(at::kDouble), {.average = Average::samples});
    EXPECT_THROW(model.set_samples(-1), UsageError);
    const auto x = batch_of(rank, 0, at::kDouble);
    model.set_samples(6);
    loss_of(model(x), x).backward();
    EXPECT_THAT([&] { loss_of(model(x), x).backward(); },
                ThrowsMessage<UsageError>(HasSubstr("set_samples")));
    EXPECT_THROW(model.register_comm_hook(comm_hooks::all_reduce()), UsageError);
  });
}

using DdpAverageBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, DdpAverageBackends, test::backends_and_nodes(), test::CaseName());

// The gradient of each weight of both layers is the factor of the loss.
struct SmallAndLarge : torch::nn::Module {
  torch::nn::Linear small =
      register_module("small", torch::nn::Linear(torch::nn::LinearOptions(8, 1).bias(false)));
  torch::nn::Linear large =
      register_module("large", torch::nn::Linear(torch::nn::LinearOptions(40'000, 1).bias(false)));
  torch::nn::Embedding table = register_module(
      "table", torch::nn::Embedding(torch::nn::EmbeddingOptions(4, 2).sparse(true)));
  at::Tensor forward(bool uses_large) {
    at::Tensor out = small(torch::ones({1, 8})).sum() + table(torch::tensor({1})).sum();
    return uses_large ? out + large(torch::ones({1, 40'000})).sum() : out;
  }
  // Throws if the elements of a gradient differ.
  std::vector<double> gradients() const {
    std::vector<double> result;
    for (const at::Tensor& grad :
         {small->weight.grad(), large->weight.grad(), table->weight.grad().to_dense()[1]}) {
      if (!grad.eq(grad.flatten()[0]).all().item<bool>()) throw std::runtime_error("not equal");
      result.push_back(grad.flatten()[0].item<double>());
    }
    return result;
  }
};

// What .grad has from an earlier step is on all ranks, and must not be added up again.
TEST_P(DdpAverageBackends, SumsOfSeveralStepsAccumulate) {
  for (DdpOptions options : {DdpOptions{},
                             {.find_unused_parameters = true},
                             {.gradient_as_bucket_view = false},
                             {.zero_copy = false}}) {
    options.average = Average::sum;
    expect_torch_ranks(3, GetParam(), [&](int rank, int) {
      constexpr double kSum = 1 + 2 + 3;  // of the factors
      const auto net = std::make_shared<SmallAndLarge>();
      DistributedDataParallel model(net, options);
      const auto train = [&](bool uses_large = true) {
        (model(uses_large) * (rank + 1)).backward();
      };
      train();
      EXPECT_THAT(net->gradients(), ::testing::Each(kSum));
      train();
      EXPECT_THAT(net->gradients(), ::testing::Each(2 * kSum));
      {
        const auto guard = model.no_sync();
        train();
      }
      train();
      EXPECT_THAT(net->gradients(), ::testing::Each(4 * kSum));
      const at::Tensor out = model(true) * (rank + 1);  // one forward, two backwards
      out.backward({}, true);
      out.backward();
      EXPECT_THAT(net->gradients(), ::testing::Each(6 * kSum));
      if (options.find_unused_parameters) {
        train(rank > 0);
        EXPECT_THAT(net->gradients(), ::testing::ElementsAre(7 * kSum, 7 * kSum - 1, 7 * kSum));
        train(false);
        EXPECT_THAT(net->gradients(), ::testing::ElementsAre(8 * kSum, 7 * kSum - 1, 8 * kSum));
        train();
        EXPECT_THAT(net->gradients(), ::testing::ElementsAre(9 * kSum, 8 * kSum - 1, 9 * kSum));
      }
      net->zero_grad();
      train();
      EXPECT_THAT(net->gradients(), ::testing::Each(kSum));
      net->zero_grad(false);
      train();
      EXPECT_THAT(net->gradients(), ::testing::Each(kSum));
    });
  }
}

TEST_P(DdpAverageBackends, SumsOfSeveralStepsOfLogicalRanksAccumulate) {
  expect_torch_ranks(2, GetParam(), [&](int, int) {
    for (const int leaves : {2, 4}) {
      const auto net = std::make_shared<SmallAndLarge>();
      DistributedDataParallel model(net, {.average = Average::sum, .logical_ranks = leaves});
      for (int step = 1; step <= 3; ++step) {
        for (const int rank : model.logical_ranks()) (model(true) * (rank + 1)).backward();
        EXPECT_THAT(net->gradients(), ::testing::Each(step * leaves * (leaves + 1) / 2.0));
      }
    }
  });
}

TEST_P(DdpAverageBackends, IgnoresTheGradientOfARankWithoutSamples) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(4, 2).sparse(true));
    torch::nn::Linear fc(2, 1);
    DistributedDataParallel model(torch::nn::Sequential(table, fc), {.average = Average::samples});
    const double factor = rank == 0 ? std::nan("") : 1;
    model.set_samples(rank == 0 ? 0 : 5);
    (model(torch::tensor({rank})) * factor).sum().backward();
    const auto grad = table->weight.grad().to_dense();
    EXPECT_TRUE(grad[0].equal(torch::zeros({2})));
    EXPECT_TRUE(grad[1].equal(fc->weight[0]));
    EXPECT_EQ(fc->bias.grad().item<float>(), 1);
  });
}

}  // namespace
}  // namespace paceline
