#include "models/resnet.h"

#include <torch/nn/init.h>

#include <utility>

namespace paceline::models {
namespace {

torch::nn::Conv2d convolution(std::int64_t in_channels, std::int64_t out_channels,
                              std::int64_t kernel, std::int64_t stride) {
  // No bias: the normalisation that follows has one.
  torch::nn::Conv2d conv(torch::nn::Conv2dOptions(in_channels, out_channels, kernel)
                             .stride(stride)
                             .padding(kernel / 2)
                             .bias(false));
  torch::nn::init::kaiming_normal_(conv->weight, 0, torch::kFanOut, torch::kReLU);
  return conv;
}

}  // namespace

BasicBlockImpl::BasicBlockImpl(std::int64_t in_channels, std::int64_t out_channels,
                               std::int64_t stride)
    : conv1_(convolution(in_channels, out_channels, 3, stride)),
      bn1_(out_channels),
      conv2_(convolution(out_channels, out_channels, 3, 1)),
      bn2_(out_channels) {
  register_module("conv1", conv1_);
  register_module("bn1", bn1_);
  register_module("conv2", conv2_);
  register_module("bn2", bn2_);
  if (stride != 1 || in_channels != out_channels) {
    shortcut_->push_back(convolution(in_channels, out_channels, 1, stride));
    shortcut_->push_back(torch::nn::BatchNorm2d(out_channels));
  }
  register_module("shortcut", shortcut_);
}

torch::Tensor BasicBlockImpl::forward(torch::Tensor x) {
  const torch::Tensor shortcut = shortcut_->is_empty() ? x : shortcut_->forward(x);
  x = bn1_(conv1_(x)).relu_();
  return bn2_(conv2_(x)).add_(shortcut).relu_();
}

ResNet18Impl::ResNet18Impl(std::int64_t classes)
    : conv1_(convolution(3, 64, 7, 2)), bn1_(64), fc_(512, classes) {
  std::int64_t in_channels = 64;
  for (const auto& [channels, stride] : {std::pair{64, 1}, {128, 2}, {256, 2}, {512, 2}}) {
    layers_->push_back(BasicBlock(in_channels, channels, stride));
    layers_->push_back(BasicBlock(channels, channels, 1));
    in_channels = channels;
  }
  register_module("conv1", conv1_);
  register_module("bn1", bn1_);
  register_module("layers", layers_);
  register_module("fc", fc_);
}

torch::Tensor ResNet18Impl::forward(torch::Tensor x) {
  x = torch::max_pool2d(bn1_(conv1_(x)).relu_(), 3, 2, 1);
  x = layers_->forward(x);
  return fc_(torch::adaptive_avg_pool2d(x, {1, 1}).flatten(1));
}

}  // namespace paceline::models
