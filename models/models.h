#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "models/classifier.h"

namespace paceline::models {

// A model and the shape of the batches that benchmarks use.
struct Model {
  std::string name;
  std::int64_t batch;                // samples per rank and batch
  std::vector<std::int64_t> sample;  // the shape of one input
  std::int64_t classes;
  std::function<std::shared_ptr<Classifier>()> make;
};

struct Batch {
  torch::Tensor input;   // float32, normally distributed
  torch::Tensor target;  // int64, in [0, classes)
};

// tiny_mlp, lenet, wide_mlp, resnet18, resnet18_b64.
std::span<const Model> all_models();

// nullptr if there is no model of that name.
const Model* find_model(const std::string& name);

// Uses torch's default generator.
Batch make_batch(const Model& model);

}  // namespace paceline::models
