#include "parallel/sync_batch_norm/normalize.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <paceline/error.h>

#include "parallel/gather.h"
#include "parallel/sync_batch_norm/normalize_on_device.h"

namespace paceline::sync_batch_norm {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// All dimensions except the channels.
std::vector<std::int64_t> reduced_dimensions(const at::Tensor& input) {
  std::vector<std::int64_t> dimensions{0};
  for (std::int64_t d = 2; d < input.dim(); ++d) dimensions.push_back(d);
  return dimensions;
}

// Reshapes one value per channel so that it broadcasts over the input.
at::Tensor per_channel(const at::Tensor& values, const at::Tensor& input) {
  std::vector<std::int64_t> shape(static_cast<std::size_t>(input.dim()), 1);
  shape[1] = -1;
  return values.to(at::toOpMathType(input.scalar_type())).view(shape);
}

at::Tensor scale_of(const at::Tensor& inverse, const at::Tensor& weight) {
  return weight.defined() ? inverse * weight.to(at::kDouble) : inverse;
}

// Adds up what gather() returns, in the order of shm::Tree over each backend.
at::Tensor sum_of(at::Tensor nodes) {
  while (nodes.size(0) > 1) {
    const std::int64_t size = nodes.size(0);
    const at::Tensor sums = nodes.slice(0, 0, size / 2 * 2, 2) + nodes.slice(0, 1, size, 2);
    nodes = size % 2 == 0 ? sums : at::cat({sums, nodes.narrow(0, size - 1, 1)});
  }
  return nodes[0];
}

struct Statistics {
  at::Tensor mean;      // by channel, float64 as variance
  at::Tensor variance;  // biased
  double count;         // of values per channel, on all ranks
};

// Combines the ranks' means and variances (Chan, Golub and LeVeque, 1979), which avoids the
// cancellation of sums of squares.
Statistics gather_statistics(const at::Tensor& input, const ProcessGroup& group) {
  const std::int64_t channels = input.size(1);
  const std::int64_t count = channels == 0 ? 0 : input.numel() / channels;
  at::Tensor mine = at::zeros({2 * channels + 1}, at::kDouble);
  if (count > 0) {
    const auto [variance, mean] =
        at::var_mean(input.to(at::kDouble), reduced_dimensions(input), false);
    mine.narrow(0, 0, channels).copy_(mean);
    mine.narrow(0, channels, channels).copy_(variance);
    mine[2 * channels] = static_cast<double>(count);
  }
  const at::Tensor all = parallel::gather(mine, group);
  const at::Tensor counts = all.narrow(1, 2 * channels, 1);
  const at::Tensor means = all.narrow(1, 0, channels);
  const double total = sum_of(counts).item<double>();
  check_count(total);
  const at::Tensor shares = counts / total;
  const at::Tensor mean = sum_of(means * shares);
  const at::Tensor variance =
      sum_of((all.narrow(1, channels, channels) + (means - mean).square()) * shares);
  return {mean, variance, total};
}

class Normalize : public torch::autograd::Function<Normalize> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const std::optional<at::Tensor>& weight,
                            const std::optional<at::Tensor>& bias, const at::Tensor& mean,
                            const at::Tensor& inverse, double count, const ProcessGroup& group) {
    const at::Tensor factor = weight.value_or(at::Tensor());
    context->save_for_backward({input, factor, mean, inverse});
    context->saved_data["count"] = count;
    context->saved_data["group"] = group.c10d();
    // Subtract the mean first: with large means, mean * scale would cancel.
    const auto type = at::toOpMathType(input.scalar_type());
    at::Tensor output =
        (input.to(type) - per_channel(mean, input)) * per_channel(scale_of(inverse, factor), input);
    if (bias) output = output + per_channel(*bias, input);
    return output.to(input.scalar_type());
  }

  static variable_list backward(AutogradContext* context, const variable_list& outputs) {
    check_no_second_derivative();
    const auto saved = context->get_saved_variables();
    const at::Tensor& input = saved[0];
    const at::Tensor& weight = saved[1];
    const at::Tensor& mean = saved[2];
    const at::Tensor& inverse = saved[3];
    const double count = context->saved_data["count"].toDouble();
    const ProcessGroup group(context->saved_data["group"].toCustomClass<::c10d::ProcessGroup>());

    const auto type = at::toOpMathType(input.scalar_type());
    const at::Tensor gradient = outputs[0].to(type);
    const at::Tensor deviation = input.to(type) - per_channel(mean, input);
    const auto dimensions = reduced_dimensions(input);
    // The sums of each channel's gradients, and of their products with the deviations.
    const at::Tensor own = at::stack({gradient.sum(dimensions, false, at::kDouble),
                                      (gradient * deviation).sum(dimensions, false, at::kDouble)});
    const at::Tensor of_weight = own[1] * inverse;
    const at::Tensor of_bias = own[0];
    at::Tensor of_input;
    const at::Tensor all = parallel::gather(own, group);
    if (context->needs_input_grad(0)) {
      const at::Tensor sums = sum_of(all);
      const at::Tensor slope = sums[1] / count * inverse.square();
      of_input =
          (gradient - per_channel(sums[0] / count, input) - deviation * per_channel(slope, input)) *
          per_channel(scale_of(inverse, weight), input);
      of_input = of_input.to(input.scalar_type());
    }
    const auto as_parameter = [&](const at::Tensor& of) {
      return weight.defined() ? of.to(weight.scalar_type()) : at::Tensor();
    };
    return {of_input, as_parameter(of_weight), as_parameter(of_bias), {}, {}, {}, {}};
  }
};

void track(const Parts& parts, const Statistics& statistics, double momentum) {
  const at::NoGradGuard no_grad;
  const auto follow = [&](const at::Tensor& running, const at::Tensor& value) {
    if (running.defined()) running.lerp_(value.to(running.scalar_type()), momentum);
  };
  follow(parts.running_mean, statistics.mean);
  follow(parts.running_var, statistics.variance * (statistics.count / (statistics.count - 1)));
}

}  // namespace

void check_count(double total) {
  if (total >= 2) return;
  throw UsageError(fmt::format(
      "SyncBatchNorm in training needs at least 2 values for each channel on all ranks together, "
      "but got {}",
      total));
}

void check_no_second_derivative() {
  if (!at::GradMode::is_enabled()) return;
  throw UsageError(
      "SyncBatchNorm has no second derivatives (create_graph = true): compute such a term "
      "without it");
}

at::Tensor normalize(const at::Tensor& input, const Parts& parts, double momentum, double eps,
                     const ProcessGroup& group) {
  if (!input.is_cpu()) return normalize_on_device(input, parts, momentum, eps, group);
  Statistics statistics;
  {
    const at::NoGradGuard no_grad;
    statistics = gather_statistics(input.detach(), group);
    track(parts, statistics, momentum);
  }
  return Normalize::apply(input, if_defined(parts.weight), if_defined(parts.bias), statistics.mean,
                          (statistics.variance + eps).rsqrt(), statistics.count, group);
}

}  // namespace paceline::sync_batch_norm
