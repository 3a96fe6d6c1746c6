#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include <paceline/error.h>
#include <paceline/optimizers.h>

namespace paceline::optim {
namespace {

void check_not_negative(const char* name, double value) {
  if (std::isfinite(value) && value >= 0) return;
  throw UsageError(fmt::format("Muon: {} is {}; it must be finite and not negative", name, value));
}

void check_options(const MuonOptions& options) {
  check_not_negative("lr", options.lr());
  check_not_negative("momentum", options.momentum());
  check_not_negative("weight_decay", options.weight_decay());
  check_not_negative("eps", options.eps());
  if (options.ns_steps() < 0 || options.ns_steps() >= 100) {
    throw UsageError(
        fmt::format("Muon: ns_steps is {}; it must be from 0 to 99", options.ns_steps()));
  }
  const std::string adjust = options.adjust_lr_fn().value_or("original");
  if (adjust != "original" && adjust != "match_rms_adamw" && adjust != "spectral_unclamped") {
    throw UsageError(
        fmt::format("Muon: adjust_lr_fn is '{}'; it must be 'original', "
                    "'match_rms_adamw' or 'spectral_unclamped'",
                    adjust));
  }
}

void check_matrix(const at::Tensor& parameter) {
  if (parameter.dim() != 2 || !parameter.is_floating_point()) {
    throw UsageError(fmt::format(
        "Muon: a parameter of type {} has {} dimensions; Muon takes matrices of real numbers: give "
        "the others to an AdamW",
        c10::toString(parameter.scalar_type()), parameter.dim()));
  }
  if (parameter.grad().defined() && parameter.grad().layout() != at::kStrided) {
    throw UsageError("Muon: a gradient is sparse; give this parameter to another optimizer");
  }
}

void check_groups(const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  for (const auto& group : groups) {
    const auto* options = dynamic_cast<const MuonOptions*>(&group.options());
    if (options == nullptr) {
      throw UsageError("Muon: a parameter group has other options than MuonOptions");
    }
    check_options(*options);
    for (const at::Tensor& parameter : group.params()) check_matrix(parameter);
  }
}

// Near the closest orthogonal matrix: the singular values become roughly 1.
at::Tensor orthogonalised(const at::Tensor& matrix, const MuonOptions& options) {
  const auto [a, b, c] = options.ns_coefficients();
  const bool is_tall = matrix.size(0) > matrix.size(1);
  at::Tensor result = matrix.to(at::kBFloat16, /*non_blocking=*/false, /*copy=*/true);
  if (is_tall) result = result.t();
  result.div_(result.norm().clamp_min(options.eps()));
  for (std::int64_t i = 0; i < options.ns_steps(); ++i) {
    const at::Tensor gram = result.mm(result.t());
    result = at::addmm(result, at::addmm(gram, gram, gram, b, c), result, a);
  }
  return is_tall ? result.t() : result;
}

double adjusted_lr(const MuonOptions& options, const at::Tensor& parameter) {
  const auto rows = static_cast<double>(parameter.size(0));
  const auto columns = static_cast<double>(parameter.size(1));
  const std::string adjust = options.adjust_lr_fn().value_or("original");
  if (adjust == "match_rms_adamw") {
    return options.lr() * (0.2 * std::sqrt(std::max(rows, columns)));
  }
  const double ratio = rows / columns;
  return options.lr() * std::sqrt(adjust == "original" ? std::max(1.0, ratio) : ratio);
}

void update_matrix(const at::Tensor& parameter, at::Tensor& momentum_buffer,
                   const MuonOptions& options) {
  const at::Tensor& gradient = parameter.grad();
  if (!momentum_buffer.defined()) momentum_buffer = at::zeros_like(gradient);
  momentum_buffer.lerp_(gradient, 1 - options.momentum());
  const at::Tensor update =
      options.nesterov() ? gradient.lerp(momentum_buffer, options.momentum()) : momentum_buffer;
  const at::Tensor direction = orthogonalised(update, options);
  parameter.mul_(1 - options.lr() * options.weight_decay());
  parameter.add_(direction, -adjusted_lr(options, parameter));
}

}  // namespace

MuonOptions::MuonOptions(double lr) : lr_(lr) {}

double MuonOptions::get_lr() const {
  return lr();
}

void MuonOptions::set_lr(double lr) {
  lr_ = lr;
}

void MuonOptions::serialize(torch::serialize::OutputArchive& archive) const {
  const auto [a, b, c] = ns_coefficients();
  archive.write("lr", at::IValue(lr()));
  archive.write("weight_decay", at::IValue(weight_decay()));
  archive.write("momentum", at::IValue(momentum()));
  archive.write("nesterov", at::IValue(nesterov()));
  archive.write("ns_coefficients", at::IValue(std::vector<double>{a, b, c}));
  archive.write("eps", at::IValue(eps()));
  archive.write("ns_steps", at::IValue(ns_steps()));
  archive.write("adjust_lr_fn", at::IValue(adjust_lr_fn().value_or("")));
}

void MuonOptions::serialize(torch::serialize::InputArchive& archive) {
  const auto read = [&](const char* name) {
    at::IValue value;
    archive.read(name, value);
    return value;
  };
  const auto coefficients = read("ns_coefficients").toDoubleVector();
  if (coefficients.size() != 3) {
    throw Error(fmt::format("torch::load of Muon: ns_coefficients has {} values, and must have 3",
                            coefficients.size()));
  }
  lr(read("lr").toDouble());
  weight_decay(read("weight_decay").toDouble());
  momentum(read("momentum").toDouble());
  nesterov(read("nesterov").toBool());
  ns_coefficients({coefficients[0], coefficients[1], coefficients[2]});
  eps(read("eps").toDouble());
  ns_steps(read("ns_steps").toInt());
  const std::string adjust = read("adjust_lr_fn").toStringRef();
  adjust_lr_fn(adjust.empty() ? std::nullopt : std::optional(adjust));
}

void MuonParamState::serialize(torch::serialize::OutputArchive& archive) const {
  if (momentum_buffer().defined()) archive.write("momentum_buffer", at::IValue(momentum_buffer()));
}

void MuonParamState::serialize(torch::serialize::InputArchive& archive) {
  at::IValue value;
  if (archive.try_read("momentum_buffer", value)) momentum_buffer(value.toTensor());
}

Muon::Muon(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
           const MuonOptions& defaults)
    : Optimizer(param_groups, std::make_unique<MuonOptions>(defaults)) {
  check_options(defaults);
  check_groups(this->param_groups());
}

at::Tensor Muon::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  const at::NoGradGuard no_grad;
  check_groups(param_groups());
  for (const auto& group : param_groups()) {
    const auto& options = static_cast<const MuonOptions&>(group.options());
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      auto& state = this->state()[parameter.unsafeGetTensorImpl()];
      if (state == nullptr) state = std::make_unique<MuonParamState>();
      update_matrix(parameter, static_cast<MuonParamState&>(*state).momentum_buffer(), options);
    }
  }
  return loss;
}

void Muon::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<MuonParamState, MuonOptions>(archive, *this);
}

void Muon::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<MuonParamState, MuonOptions>(archive, *this);
}

}  // namespace paceline::optim
