#include "parallel/ddp/gradient_hooks.h"

#include <fmt/format.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <utility>

#include <paceline/error.h>

namespace paceline::ddp {

GradientHooks::GradientHooks(const std::vector<NamedTensor>& parameters,
                             const std::vector<bool>& left_out, Call call)
    : parameters_(parameters), call_(std::move(call)), hooks_(parameters.size()) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    metadata_.push_back(metadata_of(parameters_[i].tensor));
    if (!left_out[i]) attach(i);
  }
}

GradientHooks::~GradientHooks() {
  for (const Hook& hook : hooks_) {
    if (hook.accumulator) hook.accumulator->del_post_hook(hook.key);
  }
}

GradientHooks::TensorMetadata GradientHooks::metadata_of(const at::Tensor& tensor) {
  return {tensor.scalar_type(), tensor.device(), tensor.sizes().vec()};
}

void GradientHooks::attach(std::size_t parameter) {
  using torch::autograd::variable_list;
  Hook& hook = hooks_[parameter];
  hook.accumulator = torch::autograd::impl::grad_accumulator(parameters_[parameter].tensor);
  hook.key =
      hook.accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
          [this, parameter](const variable_list& outputs, const variable_list& inputs) {
            call_(parameter, inputs[0]);
            return outputs;
          }));
}

void GradientHooks::renew() {
  for (std::size_t i = 0; i < hooks_.size(); ++i) {
    const auto& [name, tensor, sparse] = parameters_[i];
    Hook& hook = hooks_[i];
    if (!hook.accumulator) continue;
    if (torch::autograd::impl::try_get_grad_accumulator(tensor) == hook.accumulator) continue;
    if (!sparse && metadata_of(tensor) != metadata_[i]) {
      throw UsageError(fmt::format(
          "parameter {} has changed its type, device or shape since it was wrapped: change the "
          "module first, then wrap it",
          name));
    }
    if (!tensor.requires_grad()) continue;  // has no accumulator until it is unfrozen
    hook.accumulator->del_post_hook(hook.key);
    attach(i);
  }
}

bool GradientHooks::are_in_this_backward() const {
  // Empty if all nodes run. Otherwise what is returned is captured before it, and not `needed_`.
  const auto* const nodes = torch::autograd::get_current_graph_task_exec_info();
  if (nodes == nullptr || nodes->empty()) return true;
  return std::ranges::any_of(hooks_, [&](const Hook& hook) {
    const auto node = nodes->find(hook.accumulator.get());
    return node != nodes->end() && node->second.needed_;
  });
}

}  // namespace paceline::ddp
