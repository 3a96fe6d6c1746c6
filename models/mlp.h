#pragma once

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <vector>

#include "models/classifier.h"

namespace paceline::models {

// Linear layers of the given widths, input first and classes last, with ReLU between them.
class MlpImpl : public Classifier {
 public:
  explicit MlpImpl(const std::vector<std::int64_t>& widths);
  torch::Tensor forward(torch::Tensor x) override;

 private:
  torch::nn::ModuleList layers_;
};
TORCH_MODULE(Mlp);

}  // namespace paceline::models
