#pragma once

#include <torch/nn/modules/linear.h>

#include <cstdint>

#include "models/classifier.h"

namespace paceline::bench {

// A recurrent network that runs step by step: some hundred operations of a few microseconds each.
// Maps (samples, steps, features) to (samples, classes).
class UnrolledRnn : public models::Classifier {
 public:
  static constexpr std::int64_t kFeatures = 32;
  static constexpr std::int64_t kSteps = 64;
  static constexpr std::int64_t kClasses = 10;

  UnrolledRnn();
  torch::Tensor forward(torch::Tensor x) override;

 private:
  torch::nn::Linear input_;
  torch::nn::Linear hidden_;
  torch::nn::Linear output_;
};

}  // namespace paceline::bench
