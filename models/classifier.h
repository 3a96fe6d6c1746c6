#pragma once

#include <torch/nn/module.h>

namespace paceline::models {

// The interface of all models here: maps a batch of inputs to a row of scores per sample.
class Classifier : public torch::nn::Module {
 public:
  virtual torch::Tensor forward(torch::Tensor x) = 0;
};

}  // namespace paceline::models
