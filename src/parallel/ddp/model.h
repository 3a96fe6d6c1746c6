#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

#include <paceline/distributed.h>

namespace paceline::ddp {

struct NamedTensor {
  std::string name;  // the path in the module: "layer1.0.conv1.weight"
  at::Tensor tensor;
};

// The parameters that take gradients; each tensor once, under its first name.
std::vector<NamedTensor> trainable_parameters(const torch::nn::Module& module);

// Throws Mismatch, the same on every rank, if the ranks' parameters and buffers differ in number,
// name, shape, strides, type or whether they take gradients. Collective.
void check_same_model(const torch::nn::Module& module, const ProcessGroup& group);

// Makes the tensors the group's rank 0's, one broadcast for each type. Collective.
void broadcast_from_first(const std::vector<at::Tensor>& tensors, const ProcessGroup& group);

}  // namespace paceline::ddp
