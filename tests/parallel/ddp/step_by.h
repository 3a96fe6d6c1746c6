#pragma once

#include <torch/torch.h>

#include <vector>

namespace paceline::test {

// The step of an optimizer, after which the parameters have no gradients.
inline void step_by(double rate, const std::vector<torch::Tensor>& parameters) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : parameters) {
    parameter.sub_(parameter.grad() * rate);
    parameter.mutable_grad().reset();
  }
}

}  // namespace paceline::test
