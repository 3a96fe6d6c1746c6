#pragma once

#include <torch/torch.h>

namespace paceline::test {

// Part of the model is used only when told; `extra` never gets a gradient otherwise.
struct BranchesImpl : torch::nn::Module {
  torch::nn::Linear base{register_module("base", torch::nn::Linear(9, 4))};
  torch::nn::Linear extra{register_module("extra", torch::nn::Linear(9, 4))};
  torch::Tensor forward(const torch::Tensor& x, bool use_extra) {
    return use_extra ? base(x) + extra(x) : base(x);
  }
};
TORCH_MODULE(Branches);

}  // namespace paceline::test
