#pragma once

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

#include "models/classifier.h"

namespace paceline::models {

// Two 3x3 convolutions and a shortcut around them, which is a 1x1 convolution if the shape changes.
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

// A 1x1 convolution to a quarter of the channels, a 3x3 convolution with the stride, a 1x1
// convolution to all channels, and the same shortcut.
class BottleneckImpl : public torch::nn::Module {
 public:
  BottleneckImpl(std::int64_t in_channels, std::int64_t out_channels, std::int64_t stride);
  torch::Tensor forward(torch::Tensor x);

 private:
  torch::nn::Conv2d conv1_;
  torch::nn::BatchNorm2d bn1_;
  torch::nn::Conv2d conv2_;
  torch::nn::BatchNorm2d bn2_;
  torch::nn::Conv2d conv3_;
  torch::nn::BatchNorm2d bn3_;
  torch::nn::Sequential shortcut_;
};
TORCH_MODULE(Bottleneck);

// The networks of "Deep Residual Learning for Image Recognition", with the stem for large images.
class ResNet : public Classifier {
 public:
  torch::Tensor forward(torch::Tensor x) override;

 protected:
  // `layers` turn 64 channels into `features`.
  ResNet(const torch::nn::Sequential& layers, std::int64_t features, std::int64_t classes);

 private:
  torch::nn::Conv2d conv1_;
  torch::nn::BatchNorm2d bn1_;
  torch::nn::Sequential layers_;
  torch::nn::Linear fc_;
};

// 11,689,512 parameters with 1000 classes.
class ResNet18Impl : public ResNet {
 public:
  explicit ResNet18Impl(std::int64_t classes = 1000);
};
TORCH_MODULE(ResNet18);

// 25,557,032 parameters with 1000 classes.
class ResNet50Impl : public ResNet {
 public:
  explicit ResNet50Impl(std::int64_t classes = 1000);
};
TORCH_MODULE(ResNet50);

}  // namespace paceline::models
