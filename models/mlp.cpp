#include "models/mlp.h"

#include <torch/nn/modules/linear.h>

namespace paceline::models {

MlpImpl::MlpImpl(const std::vector<std::int64_t>& widths) {
  for (std::size_t i = 1; i < widths.size(); ++i) {
    layers_->push_back(torch::nn::Linear(widths[i - 1], widths[i]));
  }
  register_module("layers", layers_);
}

torch::Tensor MlpImpl::forward(torch::Tensor x) {
  x = x.flatten(1);
  for (std::size_t i = 0; i < layers_->size(); ++i) {
    if (i > 0) x = x.relu();
    x = layers_[i]->as<torch::nn::Linear>()->forward(x);
  }
  return x;
}

}  // namespace paceline::models
