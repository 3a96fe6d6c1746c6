#include "parallel/sync_batch_norm/normalize_on_device.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include <paceline/collectives.h>

#include "parallel/gather.h"

namespace paceline::sync_batch_norm {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// How many values each channel has on each rank. The ranks exchange that on the CPU, so that it
// does not wait for the device.
struct Counts {
  std::vector<std::int64_t> ranks;  // those with values
  std::vector<float> values;        // of these
  double total = 0;
};

Counts count_values(const at::Tensor& input, const ProcessGroup& group) {
  const std::int64_t channels = input.size(1);
  const std::int64_t own = channels == 0 ? 0 : input.numel() / channels;
  const at::Tensor all = parallel::gather(at::full({1}, own, at::kLong), group);
  Counts counts;
  for (std::int64_t rank = 0; rank < all.size(0); ++rank) {
    const auto count = all[rank].item<std::int64_t>();
    if (count == 0) continue;
    counts.ranks.push_back(rank);
    counts.values.push_back(static_cast<float>(count));
    counts.total += static_cast<double>(count);
  }
  return counts;
}

class NormalizeOnDevice : public torch::autograd::Function<NormalizeOnDevice> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& given,
                            const std::optional<at::Tensor>& weight,
                            const std::optional<at::Tensor>& bias, const at::Tensor& mean,
                            const at::Tensor& inverse, const at::Tensor& counts, double eps,
                            const ProcessGroup& group) {
    context->save_for_backward({given, weight.value_or(at::Tensor()), mean, inverse, counts});
    context->saved_data["group"] = group.c10d();
    if (given.numel() == 0) return at::empty_like(given);
    return at::batch_norm_elemt(given, weight, bias, mean, inverse, eps);
  }

  static variable_list backward(AutogradContext* context, const variable_list& outputs) {
    check_no_second_derivative();
    const auto saved = context->get_saved_variables();
    const at::Tensor& input = saved[0];
    const at::Tensor& weight = saved[1];
    const at::Tensor& mean = saved[2];
    const at::Tensor& inverse = saved[3];
    const ProcessGroup group(context->saved_data["group"].toCustomClass<::c10d::ProcessGroup>());
    const auto memory = input.suggest_memory_format();
    const at::Tensor gradient = outputs[0].contiguous(memory);
    const std::int64_t channels = input.size(1);
    // The sums of each channel's gradients, and of their products with the deviations.
    at::Tensor sums = at::zeros({2 * channels}, mean.options());
    at::Tensor of_weight;
    at::Tensor of_bias;
    if (input.numel() > 0) {
      at::Tensor sum;
      at::Tensor product;
      std::tie(sum, product, of_weight, of_bias) =
          at::batch_norm_backward_reduce(gradient, input, mean, inverse, if_defined(weight), true,
                                         weight.defined(), weight.defined());
      sums = at::cat({sum, product});
    } else if (weight.defined()) {
      of_weight = at::zeros_like(weight);
      of_bias = at::zeros_like(weight);
    }
    all_reduce(sums, {.group = group});
    at::Tensor of_input;
    if (context->needs_input_grad(0)) {
      of_input = input.numel() == 0 ? at::zeros_like(input)
                                    : at::batch_norm_backward_elemt(
                                          gradient, input, mean, inverse, if_defined(weight),
                                          sums.narrow(0, 0, channels),
                                          sums.narrow(0, channels, channels), saved[4]);
    }
    return {of_input, of_weight, of_bias, {}, {}, {}, {}, {}};
  }
};

}  // namespace

at::Tensor normalize_on_device(const at::Tensor& given, const Parts& parts, double momentum,
                               double eps, const ProcessGroup& group) {
  const at::Tensor input = given.contiguous(given.suggest_memory_format());
  at::Tensor mean;
  at::Tensor inverse;
  at::Tensor counts;
  {
    const at::NoGradGuard no_grad;
    const Counts found = count_values(input, group);
    check_count(found.total);
    const std::int64_t channels = input.size(1);
    at::Tensor mine =
        at::zeros({2 * channels}, input.options().dtype(at::toOpMathType(input.scalar_type())));
    if (input.numel() > 0) {
      const auto [own_mean, own_inverse] = at::batch_norm_stats(input.detach(), eps);
      mine = at::cat({own_mean, own_inverse});
    }
    const at::Tensor all =
        parallel::gather(mine, group)
            .index_select(
                0, at::tensor(found.ranks, at::kLong).to(input.device(), /*non_blocking=*/true));
    counts = at::tensor(found.values).to(mine.device(), mine.scalar_type(), /*non_blocking=*/true);
    // The kernel counts in the type of the running statistics, and types of 16 bits end too early.
    const auto widened = [&](const at::Tensor& statistic) {
      return statistic.defined() ? std::optional(statistic.to(mine.scalar_type())) : std::nullopt;
    };
    const auto running_mean = widened(parts.running_mean);
    const auto running_var = widened(parts.running_var);
    std::tie(mean, inverse) = at::batch_norm_gather_stats_with_counts(
        mine, all.narrow(1, 0, channels), all.narrow(1, channels, channels), running_mean,
        running_var, momentum, eps, counts);
    if (running_mean && !running_mean->is_same(parts.running_mean)) {
      parts.running_mean.copy_(*running_mean);
      parts.running_var.copy_(*running_var);
    }
  }
  return NormalizeOnDevice::apply(input, if_defined(parts.weight), if_defined(parts.bias), mean,
                                  inverse, counts.to(at::kInt), eps, group);
}

}  // namespace paceline::sync_batch_norm
