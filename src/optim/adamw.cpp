#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/optim/adamw.h>

#include <map>
#include <utility>
#include <vector>

#include <paceline/error.h>
#include <paceline/optimizers.h>

namespace paceline::optim {
namespace {

using torch::optim::AdamWOptions;
using torch::optim::AdamWParamState;
using torch::optim::OptimizerParamGroup;

void check_for_adamw(const at::Tensor& parameter) {
  const auto reject = [&](const char* why, const char* remedy) {
    throw UsageError(
        fmt::format("AdamW: a parameter of {} elements {}; {}", parameter.numel(), why, remedy));
  };
  const at::Tensor& gradient = parameter.grad();
  if (gradient.layout() != at::kStrided) {
    reject("has a sparse gradient", "use torch::optim::SGD for it, or a dense gradient");
  }
  // torch::optim::AdamW drops the imaginary part.
  if (!parameter.is_floating_point()) {
    reject("is not of a real floating-point type",
           "of a complex one, make view_as_real of it the parameter");
  }
  const char* const torchs = "use torch::optim::AdamW for it";
  if (!parameter.is_non_overlapping_and_dense()) reject("is not dense in memory", torchs);
  if (gradient.scalar_type() != parameter.scalar_type() ||
      gradient.device() != parameter.device()) {
    reject("has a gradient of another type or on another device", torchs);
  }
}

bool has_layout_of(const at::Tensor& tensor, const at::Tensor& other) {
  for (std::int64_t i = 0; i < other.dim(); ++i) {
    if (other.size(i) > 1 && tensor.stride(i) != other.stride(i)) return false;
  }
  return true;
}

// The kernel walks through memory and looks at no strides.
at::Tensor with_layout_of(const at::Tensor& tensor, const at::Tensor& other) {
  return has_layout_of(tensor, other) ? tensor : at::empty_like(other).copy_(tensor);
}

// The tensors of a call of the kernel, all of one type on one device.
struct FusedTensors {
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> gradients;
  std::vector<at::Tensor> exp_avgs;
  std::vector<at::Tensor> exp_avg_sqs;
  std::vector<at::Tensor> max_exp_avg_sqs;
  std::vector<at::Tensor> steps;
};

AdamWParamState& state_of(torch::optim::Optimizer& optimizer, const at::Tensor& parameter) {
  auto& state = optimizer.state()[parameter.unsafeGetTensorImpl()];
  if (state == nullptr) state = std::make_unique<AdamWParamState>();
  return static_cast<AdamWParamState&>(*state);
}

// Makes a moment if there is none yet, or gives a loaded one the parameter's layout.
const at::Tensor& prepared(at::Tensor& moment, const at::Tensor& parameter) {
  if (!moment.defined()) {
    moment = at::zeros_like(parameter);
  } else if (!has_layout_of(moment, parameter)) {
    moment = with_layout_of(moment, parameter);
  }
  return moment;
}

class FusedStep {
 public:
  FusedStep(torch::optim::Optimizer& optimizer, const AdamWOptions& options)
      : optimizer_(optimizer), options_(options) {}

  void add(const at::Tensor& parameter) {
    AdamWParamState& state = state_of(optimizer_, parameter);
    FusedTensors& tensors =
        calls_[{parameter.device().type(), parameter.device().index(), parameter.scalar_type()}];
    tensors.parameters.push_back(parameter);
    tensors.gradients.push_back(with_layout_of(parameter.grad(), parameter));
    tensors.exp_avgs.push_back(prepared(state.exp_avg(), parameter));
    tensors.exp_avg_sqs.push_back(prepared(state.exp_avg_sq(), parameter));
    if (options_.amsgrad()) {
      tensors.max_exp_avg_sqs.push_back(prepared(state.max_exp_avg_sq(), parameter));
    }
    state.step(state.step() + 1);
    tensors.steps.push_back(step_tensor(state.step(), parameter.device()));
  }

  void run() const {
    const auto [beta1, beta2] = options_.betas();
    for (const auto& one : calls_) {
      const FusedTensors& tensors = one.second;
      at::_fused_adamw_(tensors.parameters, tensors.gradients, tensors.exp_avgs,
                        tensors.exp_avg_sqs, tensors.max_exp_avg_sqs, tensors.steps, options_.lr(),
                        beta1, beta2, options_.weight_decay(), options_.eps(), options_.amsgrad(),
                        /*maximize=*/false);
    }
  }

 private:
  // Nearly always the same for all parameters, so it is made once.
  at::Tensor step_tensor(std::int64_t step, const at::Device& device) {
    if (!step_.defined() || last_step_ != step || step_.device() != device) {
      last_step_ = step;
      step_ = at::full({}, static_cast<double>(step), at::device(device).dtype(at::kFloat));
    }
    return step_;
  }

  torch::optim::Optimizer& optimizer_;
  const AdamWOptions& options_;
  std::map<std::tuple<c10::DeviceType, c10::DeviceIndex, c10::ScalarType>, FusedTensors> calls_;
  std::int64_t last_step_ = 0;
  at::Tensor step_;
};

}  // namespace

at::Tensor AdamW::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  const at::NoGradGuard no_grad;
  for (const OptimizerParamGroup& group : param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (parameter.grad().defined()) check_for_adamw(parameter);
    }
  }
  for (const OptimizerParamGroup& group : param_groups()) {
    FusedStep step(*this, static_cast<const AdamWOptions&>(group.options()));
    for (const at::Tensor& parameter : group.params()) {
      if (parameter.grad().defined()) step.add(parameter);
    }
    step.run();
  }
  return loss;
}

}  // namespace paceline::optim
