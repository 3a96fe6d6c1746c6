#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <paceline/distributed.h>

namespace paceline::sync_batch_norm {

// What a BatchNorm is made of; undefined tensors where it lacks them.
struct Parts {
  at::Tensor weight;
  at::Tensor bias;
  at::Tensor running_mean;
  at::Tensor running_var;
};

// batch_norm in training, over the batches of all ranks of the group. Differentiable; it and its
// backward are collective. Changes the running statistics, as `momentum` says.
at::Tensor normalize(const at::Tensor& input, const Parts& parts, double momentum, double eps,
                     const ProcessGroup& group);

// Whether batch_norm over the ranks is part of the module.
bool is_in(const torch::nn::Module& module);

}  // namespace paceline::sync_batch_norm
