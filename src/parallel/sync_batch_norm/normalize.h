#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <paceline/distributed.h>

namespace paceline::sync_batch_norm {

// The tensors of a BatchNorm; undefined if it has none.
struct Parts {
  at::Tensor weight;
  at::Tensor bias;
  at::Tensor running_mean;
  at::Tensor running_var;
};

// batch_norm in training, over the batches of all ranks of the group. Differentiable; forward and
// backward are collective. Updates the running statistics with `momentum`.
at::Tensor normalize(const at::Tensor& input, const Parts& parts, double momentum, double eps,
                     const ProcessGroup& group);

// Whether the module contains a SyncBatchNorm or a converted BatchNorm.
bool is_in(const torch::nn::Module& module);

}  // namespace paceline::sync_batch_norm
