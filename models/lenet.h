#pragma once

#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "models/classifier.h"

namespace paceline::models {

// LeNet-5 as it is commonly built today: 28x28 grey images padded to 32x32, a second
// convolution that connects all channels, ReLU and max-pooling. 61,706 parameters.
class LeNetImpl : public Classifier {
 public:
  LeNetImpl();
  torch::Tensor forward(torch::Tensor x) override;

 private:
  torch::nn::Conv2d conv1_;
  torch::nn::Conv2d conv2_;
  torch::nn::Linear fc1_;
  torch::nn::Linear fc2_;
  torch::nn::Linear fc3_;
};
TORCH_MODULE(LeNet);

}  // namespace paceline::models
