#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <sstream>
#include <vector>

#include <paceline/ddp.h>
#include <paceline/error.h>

#include "support/small_net.h"
#include "support/torch_ranks.h"
#include "support/worlds.h"

// DistributedDataParallel of a TorchScript module.
namespace paceline {
namespace {

using at::Tensor;
using test::batch_of;
using test::expect_same_gradients;
using test::expect_torch_ranks;
using test::loss_of;
using test::make_net;
using test::whole_batch_gradients;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// A linear layer of a net as a script.
torch::jit::Module script_of(const torch::nn::Linear& layer) {
  torch::jit::Module script("linear");
  script.register_parameter("weight", layer->weight, false);
  script.register_parameter("bias", layer->bias, false);
  script.define("def forward(self, x):\n    return torch.linear(x, self.weight, self.bias)\n");
  return script;
}

// test::Net's tensors, names and forward.
torch::jit::Module make_script() {
  const auto net = make_net(at::kDouble);
  torch::jit::Module script("net");
  script.register_module("first", script_of(net->first));
  script.register_module("second", script_of(net->second));
  script.register_module("last", script_of(net->last));
  script.define(
      "def forward(self, x):\n"
      "    x = torch.tanh(self.first.forward(x))\n"
      "    return self.last.forward(torch.tanh(self.second.forward(x)))\n");
  return script;
}

// y = w * x, and the mean that a training forward leaves.
torch::jit::Module make_scaled(double value) {
  torch::jit::Module script("scaled");
  script.register_attribute("training", c10::BoolType::get(), true);
  script.register_parameter("w", torch::full({3}, value, at::kDouble).requires_grad_(), false);
  script.register_buffer("mean", torch::full({3}, value, at::kDouble));
  script.define(
      "def forward(self, x):\n"
      "    if self.training:\n"
      "        self.mean.copy_(x)\n"
      "    return (x * self.w, {'mean': self.mean})\n");
  return script;
}

using DdpScriptWorldsUpTo3 = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, DdpScriptWorldsUpTo3, test::worlds({1, 2, 3}), test::CaseName());

TEST_P(DdpScriptWorldsUpTo3, LeavesTheGradientOfTheWholeBatch) {
  expect_torch_ranks(GetParam(), [](int rank, int n) {
    DistributedDataParallel model(make_script(), {.bucket_cap_mb = test::kTinyBucket});
    // The later ones run the code that TorchScript has optimized after it has seen some.
    for (int step = 0; step < 5; ++step) {
      model->zero_grad();
      const auto x = batch_of(rank, step, at::kDouble);
      loss_of(model->forward({x}).toTensor(), x).backward();
      expect_same_gradients(model->parameters(), whole_batch_gradients(step, n));
    }
  });
}

using DdpScriptBackends = test::BackendTest;
INSTANTIATE_TEST_SUITE_P(, DdpScriptBackends, ::testing::ValuesIn(test::backends()),
                         test::CaseName());

TEST_P(DdpScriptBackends, StartsAsRankZerosAndCopiesItsBuffers) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    const auto script = make_scaled(rank + 1);
    DistributedDataParallel model(script);
    const Tensor w = script.attr("w").toTensor();
    const Tensor mean = script.attr("mean").toTensor();
    EXPECT_TRUE(w.detach().eq(1).all().item<bool>());
    EXPECT_TRUE(mean.eq(1).all().item<bool>());
    const std::vector<torch::jit::IValue> inputs{torch::full({3}, rank + 2.0, at::kDouble)};
    const auto backward = [](const torch::jit::IValue& output) {
      output.toTuple()->elements()[0].toTensor().sum().backward();
    };
    backward(model(inputs));
    EXPECT_TRUE(w.grad().eq(2.5).all().item<bool>());
    EXPECT_TRUE(mean.eq(rank + 2).all().item<bool>());
    model.eval();
    EXPECT_FALSE(model.is_training());
    EXPECT_FALSE(script.is_training());
    backward(model(inputs[0]));
    EXPECT_TRUE(mean.eq(rank + 2).all().item<bool>());
    model.train();
    backward(model(inputs[0].toTensor() + 2));
    EXPECT_TRUE(mean.eq(rank + 4).all().item<bool>());
  });
}

TEST_P(DdpScriptBackends, IsNamedWhereItDiffers) {
  expect_torch_ranks(2, GetParam(), [](int rank, int) {
    EXPECT_THAT(
        [&] { const DistributedDataParallel model(rank == 0 ? make_scaled(1) : make_script()); },
        ThrowsMessage<Mismatch>(HasSubstr("w, a parameter of shape [3]")));
  });
}

TEST(DdpScript, FindsTheTensorsOfAnOutput) {
  expect_torch_ranks(2, "paceline", [](int, int) {
    DistributedDataParallel model(make_scaled(1), {.static_graph = true});
    for (int step = 0; step < 3; ++step) {
      model.zero_grad();
      const auto output = model(torch::ones({3}, at::kDouble));
      output.toTuple()->elements()[0].toTensor().sum().backward();
      EXPECT_TRUE(model.parameters()[0].grad().eq(1).all().item<bool>());
    }
  });
}

TEST(DdpScript, IsSavedByItsModule) {
  expect_torch_ranks(2, "paceline", [](int, int) {
    const DistributedDataParallel model(make_scaled(3));
    std::stringstream file;
    model.module()->save(file);
    const auto loaded = torch::jit::load(file);
    EXPECT_TRUE(loaded.attr("w").toTensor().equal(model.parameters()[0]));
  });
}

}  // namespace
}  // namespace paceline
