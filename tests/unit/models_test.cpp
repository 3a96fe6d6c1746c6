#include "models/models.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/Functions.h>

namespace paceline::models {
namespace {

std::int64_t parameter_count(const Model& model) {
  std::int64_t count = 0;
  for (const torch::Tensor& parameter : model.make()->parameters()) count += parameter.numel();
  return count;
}

TEST(Models, HaveAsManyParametersAsTheirPapersSay) {
  EXPECT_EQ(parameter_count(*find_model("tiny_mlp")), 64 * 64 + 64 + 64 * 10 + 10);
  EXPECT_EQ(parameter_count(*find_model("lenet")), 61'706);
  EXPECT_EQ(parameter_count(*find_model("wide_mlp")), 3 * (2048 * 2048 + 2048) + 2048 * 10 + 10);
  EXPECT_EQ(parameter_count(*find_model("resnet18")), 11'689'512);
  EXPECT_EQ(parameter_count(*find_model("resnet18_b64")), 11'689'512);
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

TEST(Models, LearnFromTheirBatch) {
  at::manual_seed(1);
  for (const Model& model : all_models()) {
    if (model.batch > 32 && model.name != "lenet") continue;  // as resnet18, and slow
    SCOPED_TRACE(model.name);
    const auto classifier = model.make();
    const Batch batch = make_batch(model);
    const auto scores = classifier->forward(batch.input);
    EXPECT_EQ(scores.sizes(), (std::vector<std::int64_t>{model.batch, model.classes}));
    at::cross_entropy_loss(scores, batch.target).backward();
    for (const auto& parameter : classifier->named_parameters()) {
      EXPECT_TRUE(parameter->grad().defined() && parameter->grad().abs().sum().item<double>() > 0)
          << parameter.key();
    }
  }
}

}  // namespace
}  // namespace paceline::models
