#include "models/lenet.h"

namespace paceline::models {

LeNetImpl::LeNetImpl()
    : conv1_(torch::nn::Conv2dOptions(1, 6, 5).padding(2)),
      conv2_(torch::nn::Conv2dOptions(6, 16, 5)),
      fc1_(16 * 5 * 5, 120),
      fc2_(120, 84),
      fc3_(84, 10) {
  register_module("conv1", conv1_);
  register_module("conv2", conv2_);
  register_module("fc1", fc1_);
  register_module("fc2", fc2_);
  register_module("fc3", fc3_);
}

torch::Tensor LeNetImpl::forward(torch::Tensor x) {
  x = torch::max_pool2d(conv1_(x).relu(), 2);
  x = torch::max_pool2d(conv2_(x).relu(), 2);
  x = fc1_(x.flatten(1)).relu();
  return fc3_(fc2_(x).relu());
}

}  // namespace paceline::models
