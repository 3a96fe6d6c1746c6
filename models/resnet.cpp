#include "models/resnet.h"

#include <torch/nn/init.h>

#include <array>

namespace paceline::models {
namespace {

torch::nn::Conv2d convolution(std::int64_t in_channels, std::int64_t out_channels,
                              std::int64_t kernel, std::int64_t stride) {
  // No bias: the normalisation after it has one.
  torch::nn::Conv2d conv(torch::nn::Conv2dOptions(in_channels, out_channels, kernel)
                             .stride(stride)
                             .padding(kernel / 2)
                             .bias(false));
  torch::nn::init::kaiming_normal_(conv->weight, 0, torch::kFanOut, torch::kReLU);
  return conv;
}

// Empty if x has the shape already.
torch::nn::Sequential make_shortcut(std::int64_t in_channels, std::int64_t out_channels,
                                    std::int64_t stride) {
  torch::nn::Sequential shortcut;
  if (stride != 1 || in_channels != out_channels) {
    shortcut->push_back(convolution(in_channels, out_channels, 1, stride));
    shortcut->push_back(torch::nn::BatchNorm2d(out_channels));
  }
  return shortcut;
}

// Four stages with the given numbers of blocks, the first with `channels` channels. Each further
// stage doubles the channels, and halves height and width.
template <typename Block>
torch::nn::Sequential make_layers(const std::array<int, 4>& blocks, std::int64_t channels) {
  torch::nn::Sequential layers;
  std::int64_t in_channels = 64;
  std::int64_t stride = 1;
  for (const int count : blocks) {
    for (int i = 0; i < count; ++i) {
      layers->push_back(Block(in_channels, channels, i == 0 ? stride : 1));
      in_channels = channels;
    }
    channels *= 2;
    stride = 2;
  }
  return layers;
}

}  // namespace

BasicBlockImpl::BasicBlockImpl(std::int64_t in_channels, std::int64_t out_channels,
                               std::int64_t stride)
    : conv1_(convolution(in_channels, out_channels, 3, stride)),
      bn1_(out_channels),
      conv2_(convolution(out_channels, out_channels, 3, 1)),
      bn2_(out_channels),
      shortcut_(make_shortcut(in_channels, out_channels, stride)) {
  register_module("conv1", conv1_);
  register_module("bn1", bn1_);
  register_module("conv2", conv2_);
  register_module("bn2", bn2_);
  register_module("shortcut", shortcut_);
}

torch::Tensor BasicBlockImpl::forward(torch::Tensor x) {
  const torch::Tensor shortcut = shortcut_->is_empty() ? x : shortcut_->forward(x);
  x = bn1_(conv1_(x)).relu_();
  return bn2_(conv2_(x)).add_(shortcut).relu_();
}

BottleneckImpl::BottleneckImpl(std::int64_t in_channels, std::int64_t out_channels,
                               std::int64_t stride)
    : conv1_(convolution(in_channels, out_channels / 4, 1, 1)),
      bn1_(out_channels / 4),
      conv2_(convolution(out_channels / 4, out_channels / 4, 3, stride)),
      bn2_(out_channels / 4),
      conv3_(convolution(out_channels / 4, out_channels, 1, 1)),
      bn3_(out_channels),
      shortcut_(make_shortcut(in_channels, out_channels, stride)) {
  register_module("conv1", conv1_);
  register_module("bn1", bn1_);
  register_module("conv2", conv2_);
  register_module("bn2", bn2_);
  register_module("conv3", conv3_);
  register_module("bn3", bn3_);
  register_module("shortcut", shortcut_);
}

torch::Tensor BottleneckImpl::forward(torch::Tensor x) {
  const torch::Tensor shortcut = shortcut_->is_empty() ? x : shortcut_->forward(x);
  x = bn1_(conv1_(x)).relu_();
  x = bn2_(conv2_(x)).relu_();
  return bn3_(conv3_(x)).add_(shortcut).relu_();
}

ResNet::ResNet(const torch::nn::Sequential& layers, std::int64_t features, std::int64_t classes)
    : conv1_(convolution(3, 64, 7, 2)), bn1_(64), layers_(layers), fc_(features, classes) {
  register_module("conv1", conv1_);
  register_module("bn1", bn1_);
  register_module("layers", layers_);
  register_module("fc", fc_);
}

torch::Tensor ResNet::forward(torch::Tensor x) {
  x = torch::max_pool2d(bn1_(conv1_(x)).relu_(), 3, 2, 1);
  x = layers_->forward(x);
  return fc_(torch::adaptive_avg_pool2d(x, {1, 1}).flatten(1));
}

ResNet18Impl::ResNet18Impl(std::int64_t classes)
    : ResNet(make_layers<BasicBlock>({2, 2, 2, 2}, 64), 512, classes) {}

ResNet50Impl::ResNet50Impl(std::int64_t classes)
    : ResNet(make_layers<Bottleneck>({3, 4, 6, 3}, 256), 2048, classes) {}

}  // namespace paceline::models
