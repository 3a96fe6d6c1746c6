#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include <paceline/distributed.h>

#include "support/torch_ranks.h"

namespace paceline::test {

inline constexpr int kWidth = 6;
inline constexpr int kSamples = 12;

// Stage `number` of every model here.
inline torch::nn::Sequential stage_of(int number, at::ScalarType type = at::kFloat) {
  torch::manual_seed(static_cast<std::uint64_t>(number) + 1);
  torch::nn::Sequential stage(torch::nn::Linear(kWidth, kWidth), torch::nn::Tanh(),
                              torch::nn::BatchNorm1d(kWidth));
  stage->to(type);
  return stage;
}

inline at::Tensor input_of(int step, int replica = 0) {
  torch::manual_seed(static_cast<std::uint64_t>(100 + 10 * step + replica));
  return torch::randn({kSamples, kWidth}, at::kDouble);
}
inline at::Tensor target_of(const at::Tensor& input) {
  return input.cos().roll(1, 1);
}
inline at::Tensor squares(const at::Tensor& output, const at::Tensor& target) {
  return (output - target).pow(2).mean();
}

// What each rank of a world throws.
inline std::vector<std::string> errors_of(int ranks, const std::function<void(int rank)>& body) {
  std::vector<std::string> errors;
  const auto ends = run_torch_ranks(ranks, "paceline", [&](const RankContext& context) {
    try {
      const World world = init_process_group(context.init);
      body(context.rank);
    } catch (const std::exception& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  });
  for (const auto& end : ends) errors.push_back(end.report);
  return errors;
}

// Passes on two tensors and an index, of which only one needs a gradient.
struct ForkImpl : torch::nn::Module {
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(kWidth, kWidth))};
  std::tuple<at::Tensor, at::Tensor, std::vector<at::Tensor>> forward(const at::Tensor& x) {
    const auto y = linear(x);
    return {y, x, {torch::arange(x.size(0)), y.exp()}};
  }
};
TORCH_MODULE(Fork);
// Leaves one of its inputs unused.
struct JoinImpl : torch::nn::Module {
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(kWidth, kWidth))};
  at::Tensor forward(const at::Tensor& y, const at::Tensor& x, const at::Tensor& index,
                     const at::Tensor& /*unused*/) {
    return linear(y.index_select(0, index) * x);
  }
};
TORCH_MODULE(Join);

}  // namespace paceline::test
