#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include <paceline/optimizers.h>

#include "optim/patterns.h"

// The trainings of optimizers_expected.py.
namespace paceline::optim::test {

inline constexpr int kSteps = 6;

struct ExpectedParameters {
  std::string name;
  std::vector<std::vector<double>> whole;  // after the training
  std::vector<std::vector<double>> half;   // after its first half
};

inline const std::vector<ExpectedParameters>& expected_parameters() {
  static const std::vector<ExpectedParameters> all{
#include "optimizers_expected.inc"
  };
  return all;
}

inline bool has(const std::string& name, const char* word) {
  return name.find(word) != std::string::npos;
}

inline std::vector<at::Tensor> make_parameters(const std::string& name) {
  const auto dtype = has(name, "float64")    ? at::kDouble
                     : has(name, "bfloat16") ? at::kBFloat16
                                             : at::kFloat;
  std::vector<at::Tensor> parameters;
  for (const auto& [rows, columns] : {std::pair{4, 6}, {7, 3}, {5, 5}}) {
    const int index = static_cast<int>(parameters.size());
    parameters.push_back(pattern(rows * columns, 31, index, 37, 32)
                             .reshape({rows, columns})
                             .to(dtype)
                             .requires_grad_());
  }
  return parameters;
}

inline std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    const std::string& name, const std::vector<at::Tensor>& parameters) {
  if (has(name, "AdamW")) {
    torch::optim::AdamWOptions options;
    if (has(name, "options")) {
      options.lr(0.02).betas({0.8, 0.97}).eps(1e-5).weight_decay(0.3);
    }
    if (has(name, "amsgrad")) options.lr(0.01).amsgrad(true);
    return std::make_unique<AdamW>(parameters, options);
  }
  MuonOptions options;
  if (!has(name, "default")) options.lr(0.02);
  if (has(name, "options")) {
    options.weight_decay(0.3).momentum(0.8).ns_coefficients({3.0, -3.2, 1.2}).eps(1e-3).ns_steps(3);
  }
  if (has(name, "no nesterov")) options.nesterov(false);
  if (has(name, "rms")) options.adjust_lr_fn("match_rms_adamw");
  if (has(name, "unclamped")) options.adjust_lr_fn("spectral_unclamped");
  return std::make_unique<Muon>(parameters, options);
}

inline void train(std::vector<at::Tensor>& parameters, torch::optim::Optimizer& optimizer,
                  int begin, int end) {
  for (int step = begin; step < end; ++step) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      at::Tensor& parameter = parameters[i];
      parameter.mutable_grad() =
          i == 2 && step < 2
              ? at::Tensor()
              : pattern(parameter.numel(), 17, 5 * step + static_cast<int>(i), 29, 64)
                    .reshape(parameter.sizes())
                    .to(parameter.scalar_type());
    }
    optimizer.step();
  }
}

// Python's fused AdamW runs the same kernel. The bfloat16 products of Muon differ between kinds of
// CPUs.
inline double tolerance(const std::string& name) {
  if (has(name, "Muon")) return has(name, "default") ? 3e-4 : 2e-3;
  if (has(name, "bfloat16")) return has(name, "fused") ? 0 : 2e-2;
  if (has(name, "float64")) return 1e-12;
  return has(name, "fused") ? 1e-7 : 1e-6;
}

inline void expect_parameters(const std::vector<at::Tensor>& parameters,
                              const std::vector<std::vector<double>>& expected,
                              const std::string& name) {
  ASSERT_EQ(parameters.size(), expected.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto got = parameters[i].detach().to(at::kDouble).flatten();
    const auto difference = (got - torch::tensor(expected[i], at::kDouble)).abs().max();
    EXPECT_LE(difference.item<double>(), tolerance(name)) << name << ", parameter " << i;
  }
}

}  // namespace paceline::optim::test
