#pragma once

#include <torch/nn/module.h>

namespace paceline::models {

// What every model here is: a batch of inputs becomes a row of scores per sample.
class Classifier : public torch::nn::Module {
 public:
  virtual torch::Tensor forward(torch::Tensor x) = 0;
};

}  // namespace paceline::models
