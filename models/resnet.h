#pragma once

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

#include "models/classifier.h"

namespace paceline::models {

// Two 3x3 convolutions and the shortcut around them, which is a 1x1 convolution where the shape
// changes.
class BasicBlockImpl : public torch::nn::Module {
 public:
  BasicBlockImpl(std::int64_t in_channels, std::int64_t out_channels, std::int64_t stride);
  torch::Tensor forward(torch::Tensor x);

 private:
  torch::nn::Conv2d conv1_;
  torch::nn::BatchNorm2d bn1_;
  torch::nn::Conv2d conv2_;
  torch::nn::BatchNorm2d bn2_;
  torch::nn::Sequential shortcut_;
};
TORCH_MODULE(BasicBlock);

// ResNet-18 of "Deep Residual Learning for Image Recognition", with the stem for large images.
// 11,689,512 parameters with 1000 classes.
class ResNet18Impl : public Classifier {
 public:
  explicit ResNet18Impl(std::int64_t classes = 1000);
  torch::Tensor forward(torch::Tensor x) override;

 private:
  torch::nn::Conv2d conv1_;
  torch::nn::BatchNorm2d bn1_;
  torch::nn::Sequential layers_;
  torch::nn::Linear fc_;
};
TORCH_MODULE(ResNet18);

}  // namespace paceline::models
