#include "models/models.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/Functions.h>

#include <map>

#include "models/resnet.h"

namespace paceline::models {
namespace {

std::int64_t parameter_count(const Classifier& classifier) {
  std::int64_t count = 0;
  for (const torch::Tensor& parameter : classifier.parameters()) count += parameter.numel();
  return count;
}
std::int64_t parameter_count(const std::string& model) {
  return parameter_count(*find_model(model)->make());
}

void expect_gradients(Classifier& classifier, const Batch& batch, std::int64_t classes) {
  const auto scores = classifier.forward(batch.input);
  EXPECT_EQ(scores.sizes(), (std::vector<std::int64_t>{batch.input.size(0), classes}));
  const auto loss = at::cross_entropy_loss(scores, batch.target);
  loss.backward();
  double square = 0;
  for (const auto& parameter : classifier.named_parameters()) {
    ASSERT_TRUE(parameter->grad().defined()) << parameter.key();
    const auto part = parameter->grad().square().sum().item<double>();
    EXPECT_GT(part, 0) << parameter.key();
    square += part;
  }
  // A small step along the gradients that should take 1 % off the loss.
  const at::NoGradGuard no_grad;
  const double step = 0.01 * loss.item<double>() / square;
  for (auto& parameter : classifier.parameters()) parameter -= step * parameter.grad();
  const auto after = at::cross_entropy_loss(classifier.forward(batch.input), batch.target);
  EXPECT_NEAR(after.item<double>() / loss.item<double>(), 0.99, 0.005);
}

TEST(Models, HaveAsManyParametersAsTheirPapersSay) {
  EXPECT_EQ(parameter_count("tiny_mlp"), 64 * 64 + 64 + 64 * 10 + 10);
  EXPECT_EQ(parameter_count("lenet"), 61'706);
  EXPECT_EQ(parameter_count("wide_mlp"), 3 * (2048 * 2048 + 2048) + 2048 * 10 + 10);
  EXPECT_EQ(parameter_count("resnet18"), 11'689'512);
  EXPECT_EQ(parameter_count("resnet18_b64"), 11'689'512);
  EXPECT_EQ(parameter_count(*ResNet50()), 25'557'032);
}

TEST(Models, HaveTheNamesAndBatchesThatAreMeasured) {
  std::vector<std::pair<std::string, std::int64_t>> found;
  for (const Model& model : all_models()) found.emplace_back(model.name, model.batch);
  EXPECT_THAT(found,
              testing::ElementsAre(testing::Pair("tiny_mlp", 16), testing::Pair("lenet", 64),
                                   testing::Pair("wide_mlp", 32), testing::Pair("resnet18", 8),
                                   testing::Pair("resnet18_b64", 64)));
  EXPECT_EQ(find_model("resnet"), nullptr);
}

TEST(Models, EveryParameterGetsAGradientThatLowersTheLoss) {
  at::manual_seed(1);
  for (const Model& model : all_models()) {
    if (model.batch > 32 && model.name != "lenet")
      continue;  // slow, and the same network as resnet18
    SCOPED_TRACE(model.name);
    expect_gradients(*model.make(), make_batch(model), model.classes);
  }
  expect_gradients(*ResNet50(10), {at::randn({2, 3, 64, 64}), at::randint(10, {2}, at::kLong)}, 10);
}

// As in torchvision; the paper's network has it in the 1x1 convolution before.
TEST(Models, BottleneckBlocksHaveTheStrideInThe3x3Convolution) {
  std::map<std::int64_t, int> strided;  // by kernel size
  for (const auto& module : ResNet50()->modules()) {
    const auto* const conv = module->as<torch::nn::Conv2d>();
    if (conv == nullptr || conv->options.stride()->at(0) == 1) continue;
    ++strided[conv->options.kernel_size()->at(0)];
  }
  EXPECT_THAT(strided, testing::ElementsAre(testing::Pair(1, 3),  // the shortcuts
                                            testing::Pair(3, 3), testing::Pair(7, 1)));
}

}  // namespace
}  // namespace paceline::models
