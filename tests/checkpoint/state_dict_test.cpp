#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include <paceline/checkpoint.h>
#include <paceline/error.h>

#include "support/temporary_directory.h"

namespace paceline {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

struct NormNetImpl : torch::nn::Module {
  torch::nn::Linear first{register_module("first", torch::nn::Linear(3, 4))};
  torch::nn::BatchNorm1d norm{register_module("norm", torch::nn::BatchNorm1d(4))};
  torch::nn::Sequential last{register_module(
      "last",
      torch::nn::Sequential(torch::nn::ReLU(),
                            torch::nn::Linear(torch::nn::LinearOptions(4, 2).bias(false))))};
  torch::Tensor scale = register_parameter("scale", torch::ones({2}));
  torch::Tensor forward(const torch::Tensor& x) { return last->forward(norm(first(x))) * scale; }
};
TORCH_MODULE(NormNet);

// What Python prints for the same module.
TEST(StateDict, HasPythonsNamesAndOrder) {
  NormNet net;
  EXPECT_THAT(state_dict(*net).keys(),
              ElementsAre("scale", "first.weight", "first.bias", "norm.weight", "norm.bias",
                          "norm.running_mean", "norm.running_var", "norm.num_batches_tracked",
                          "last.1.weight"));
  EXPECT_FALSE(state_dict(*net)["scale"].requires_grad());
  state_dict(*net)["scale"].fill_(3);
  EXPECT_EQ(net->scale[0].item<float>(), 3);
}

TEST(StateDict, IsLoadedAsAWholeOrNotAtAll) {
  NormNet net;
  const at::Tensor before = net->first->weight.detach().clone();
  StateDict state;
  for (const auto& one : state_dict(*net)) state.insert(one.key(), one.value() + 1);
  const auto refused = [&](const at::Tensor& last, const char* why) {
    state["last.1.weight"] = last;
    EXPECT_THAT(
        [&] { load_state_dict(*net, state); },
        ThrowsMessage<Error>(AllOf(HasSubstr("last.1.weight of the module"), HasSubstr(why))));
    EXPECT_TRUE(torch::equal(net->first->weight, before));
  };
  const at::Tensor last = net->last->at<torch::nn::LinearImpl>(1).weight.detach();
  refused(last.to_sparse(), "its layout differs");
  refused(last.to(at::kComplexFloat), "it is complex");
  refused(last.to(at::kMeta), "");
}

TEST(StateDict, AModuleIsReadAsItIsWritten) {
  const test::TemporaryDirectory directory;
  const auto path = directory.path() / "net.safetensors";
  NormNet net;
  const auto x = torch::randn({8, 3});
  net->forward(x);  // the running statistics change
  paceline::save(*net, path);
  NormNet other;
  paceline::load(*other, path);
  net->eval();
  other->eval();
  EXPECT_TRUE(torch::equal(net->forward(x), other->forward(x)));
  EXPECT_TRUE(other->scale.requires_grad());
  EXPECT_EQ(other->norm->num_batches_tracked.item<int>(), 1);
}

TEST(StateDict, IsConvertedToTheTypesOfTheModule) {
  torch::nn::Linear linear(2, 2);
  StateDict state;
  state.insert("weight", torch::full({2, 2}, 0.5, torch::kDouble));
  state.insert("bias", torch::full({2}, 0.25, torch::kHalf));
  load_state_dict(*linear, state);
  EXPECT_EQ(linear->weight.scalar_type(), torch::kFloat);
  EXPECT_EQ(linear->weight.sum().item<float>(), 2);
  EXPECT_EQ(linear->bias.sum().item<float>(), 0.5);
}

TEST(StateDict, ThatDoesNotFitChangesNothing) {
  torch::nn::Linear linear(2, 3);
  const auto before = linear->weight.detach().clone();
  StateDict state;
  state.insert("weight", torch::ones({3, 2}));
  state.insert("fc.bias", torch::ones({3}));
  EXPECT_THAT([&] { load_state_dict(*linear, state); },
              ThrowsMessage<Error>(
                  AllOf(HasSubstr("missing: bias"), HasSubstr("not of this module: fc.bias"))));
  state.insert("bias", torch::ones({2}));
  for (const bool strict : {true, false}) {
    EXPECT_THAT([&] { load_state_dict(*linear, state, strict); },
                ThrowsMessage<Error>(HasSubstr("of another shape: bias (2 in place of 3)")));
  }
  EXPECT_TRUE(torch::equal(linear->weight, before));
  StateDict part;
  part.insert("weight", torch::ones({3, 2}));
  part.insert("other", torch::ones({1}));
  load_state_dict(*linear, part, false);
  EXPECT_TRUE(torch::equal(linear->weight, torch::ones({3, 2})));
}

TEST(StateDict, AFileThatDoesNotFitIsNamed) {
  const test::TemporaryDirectory directory;
  const auto path = directory.path() / "net.safetensors";
  paceline::save(*torch::nn::Linear(2, 2), path);
  NormNet net;
  EXPECT_THAT([&] { paceline::load(*net, path); },
              ThrowsMessage<Error>(
                  AllOf(HasSubstr(path.string()), HasSubstr("not of this module: weight, bias"))));
  paceline::load(*net, path, {.strict = false});
}

}  // namespace
}  // namespace paceline
