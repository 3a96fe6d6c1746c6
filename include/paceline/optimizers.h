#pragma once

/// @file
/// Optimizers beside LibTorch's: a faster AdamW, and Muon.

#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <paceline/api.h>

namespace paceline::optim {

/// LibTorch's AdamW with the fused step of Python's AdamW(fused=True), which passes over the memory
/// of a parameter once. Options, states, files of torch::save and state_dict are LibTorch's, so
/// either loads what the other saved. Results are the same up to rounding.
class PACELINE_API AdamW : public torch::optim::AdamW {
 public:
  using torch::optim::AdamW::AdamW;

  /// Updates the parameters that have a gradient. Calls the closure first, with gradients enabled,
  /// and returns what it returned. Throws UsageError, and changes nothing, for a sparse gradient, a
  /// parameter that is not of a real floating-point type or not dense in memory, and a gradient of
  /// another type than its parameter.
  at::Tensor step(LossClosure closure = nullptr) override;
};

/// Options of Muon, with the names and defaults of Python's torch.optim.Muon. The options of a
/// parameter group are used as they are: they inherit nothing from the optimizer's.
struct PACELINE_API MuonOptions : torch::optim::OptimizerCloneableOptions<MuonOptions> {
  /// The coefficients of the Newton-Schulz iteration's polynomial.
  using ns_coefficients_t = std::tuple<double, double, double>;

  /// Sets the learning rate. Implicit, as of LibTorch's options.
  MuonOptions(double lr = 1e-3);

  /// The learning rate; not negative.
  TORCH_ARG(double, lr) = 1e-3;
  /// The share of a parameter that a step with a learning rate of 1 takes away; not negative.
  TORCH_ARG(double, weight_decay) = 0.1;
  /// The share of the momentum that a step keeps; not negative.
  TORCH_ARG(double, momentum) = 0.95;
  /// Whether to use Nesterov's momentum.
  TORCH_ARG(bool, nesterov) = true;
  /// The coefficients of the Newton-Schulz iteration.
  TORCH_ARG(ns_coefficients_t, ns_coefficients) = {3.4445, -4.7750, 2.0315};
  /// The least norm that the iteration divides by.
  TORCH_ARG(double, eps) = 1e-7;
  /// How often the iteration is applied; from 0 to 99.
  TORCH_ARG(std::int64_t, ns_steps) = 5;
  /// How the shape of a parameter changes the learning rate: "original", which is the default,
  /// "match_rms_adamw" or "spectral_unclamped".
  TORCH_ARG(std::optional<std::string>, adjust_lr_fn) = std::nullopt;

 public:
  /// For torch::load.
  void serialize(torch::serialize::InputArchive& archive) override;
  /// For torch::save.
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override;   ///< The learning rate.
  void set_lr(double lr) override;  ///< Sets the learning rate.
};

/// What Muon keeps for a parameter.
struct PACELINE_API MuonParamState : torch::optim::OptimizerCloneableParamState<MuonParamState> {
  /// The average of the gradients.
  TORCH_ARG(at::Tensor, momentum_buffer);

 public:
  /// For torch::load.
  void serialize(torch::serialize::InputArchive& archive) override;
  /// For torch::save.
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// Python's torch.optim.Muon: each step of a matrix is orthogonalised, by a Newton-Schulz iteration
/// in bfloat16. It is for the matrices of hidden layers; use AdamW for embeddings, the last layer,
/// biases and all else.
///
///     optim::Muon muon(matrices, optim::MuonOptions(0.02).weight_decay(0.01));
///
/// torch::save, torch::load and state_dict take it as they take LibTorch's optimizers.
class PACELINE_API Muon : public torch::optim::Optimizer {
 public:
  /// Throws UsageError for an option out of range, and for a parameter that is not a matrix of a
  /// real type.
  explicit Muon(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                const MuonOptions& defaults = {});
  /// The same, of one group.
  explicit Muon(std::vector<at::Tensor> params, const MuonOptions& defaults = {})
      : Muon(std::vector{torch::optim::OptimizerParamGroup(std::move(params))}, defaults) {}

  /// Updates the parameters that have a gradient. Calls the closure first, with gradients enabled,
  /// and returns what it returned. Throws UsageError, and changes nothing, for a sparse gradient,
  /// and as the constructor does for groups and options that came later.
  at::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;  ///< For torch::save.
  void load(torch::serialize::InputArchive& archive) override;         ///< For torch::load.
};

}  // namespace paceline::optim
