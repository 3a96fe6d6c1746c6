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
