#include "models/models.h"

#include <ATen/Functions.h>

#include <algorithm>

#include "models/lenet.h"
#include "models/mlp.h"
#include "models/resnet.h"

namespace paceline::models {
namespace {

std::function<std::shared_ptr<Classifier>()> mlp(std::vector<std::int64_t> widths) {
  return [widths = std::move(widths)] { return std::make_shared<MlpImpl>(widths); };
}
std::shared_ptr<Classifier> lenet() {
  return std::make_shared<LeNetImpl>();
}
std::shared_ptr<Classifier> resnet18() {
  return std::make_shared<ResNet18Impl>();
}

}  // namespace

std::span<const Model> all_models() {
  static const std::vector<Model> models{
      {"tiny_mlp", 16, {64}, 10, mlp({64, 64, 10})},
      {"lenet", 64, {1, 28, 28}, 10, lenet},
      {"wide_mlp", 32, {2048}, 10, mlp({2048, 2048, 2048, 2048, 10})},
      {"resnet18", 8, {3, 64, 64}, 1000, resnet18},
      {"resnet18_b64", 64, {3, 64, 64}, 1000, resnet18},
  };
  return models;
}

const Model* find_model(const std::string& name) {
  const auto models = all_models();
  const auto found = std::find_if(models.begin(), models.end(),
                                  [&](const Model& model) { return model.name == name; });
  return found == models.end() ? nullptr : &*found;
}

Batch make_batch(const Model& model) {
  std::vector<std::int64_t> shape = model.sample;
  shape.insert(shape.begin(), model.batch);
  return {at::randn(shape), at::randint(model.classes, {model.batch}, at::kLong)};
}

}  // namespace paceline::models
