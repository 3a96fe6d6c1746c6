#include "parallel/parameter_server/shard.h"

#include <ATen/OpMathType.h>
#include <ATen/core/grad_mode.h>

#include <utility>

namespace paceline::parameter_server {
namespace {

// Undefined if no worker has one; a worker without one counts as zero.
at::Tensor average_of(const std::vector<const FlatTensors*>& gradients, std::size_t index) {
  const at::NoGradGuard no_grad;
  at::Tensor sum;
  at::ScalarType type{};
  for (const FlatTensors* const one : gradients) {
    const at::Tensor gradient = one->at(index);
    if (!gradient.defined()) continue;
    type = gradient.scalar_type();
    sum = sum.defined() ? sum.add_(gradient) : gradient.to(at::toOpMathType(type));
  }
  if (!sum.defined()) return sum;
  if (gradients.size() > 1) sum.div_(static_cast<double>(gradients.size()));
  return sum.to(type);
}

}  // namespace

Shard::Shard(Tensors parameters, std::unique_ptr<torch::optim::Optimizer> optimizer)
    : parameters_(std::move(parameters)), optimizer_(std::move(optimizer)) {}

void Shard::step(const std::vector<const FlatTensors*>& gradients) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].mutable_grad() = average_of(gradients, i);
  }
  optimizer_->step();
  // The next message comes to the same memory.
  for (const at::Tensor& parameter : parameters_) parameter.mutable_grad() = at::Tensor();
}

}  // namespace paceline::parameter_server
