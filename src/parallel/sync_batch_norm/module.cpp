#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ostream>

#include <paceline/error.h>
#include <paceline/sync_batch_norm.h>

#include "parallel/sync_batch_norm/normalize.h"

namespace paceline {

SyncBatchNormImpl::SyncBatchNormImpl(SyncBatchNormOptions wanted) : options(std::move(wanted)) {
  if (options.num_features < 1) {
    throw UsageError(fmt::format("SyncBatchNorm of {} features: there must be at least 1",
                                 options.num_features));
  }
  const at::IntArrayRef shape(options.num_features);
  const auto parameter = [&](const char* name) {
    return register_parameter(name, options.affine ? at::empty(shape) : at::Tensor(),
                              options.affine);
  };
  weight = parameter("weight");
  bias = parameter("bias");
  const bool tracks = options.track_running_stats;
  running_mean = register_buffer("running_mean", tracks ? at::empty(shape) : at::Tensor());
  running_var = register_buffer("running_var", tracks ? at::empty(shape) : at::Tensor());
  num_batches_tracked =
      register_buffer("num_batches_tracked", tracks ? at::zeros({}, at::kLong) : at::Tensor());
  reset_parameters();
}

void SyncBatchNormImpl::reset_parameters() {
  const at::NoGradGuard no_grad;
  if (options.track_running_stats) {
    running_mean.zero_();
    running_var.fill_(1);
    num_batches_tracked.zero_();
  }
  if (options.affine) {
    weight.fill_(1);
    bias.zero_();
  }
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input) {
  if (input.dim() < 2 || input.size(1) != options.num_features || !input.is_floating_point()) {
    throw UsageError(fmt::format(
        "SyncBatchNorm of {} features got a tensor of type {} and shape [{}]: its input must be "
        "floating-point, of shape (N, {}, ...)",
        options.num_features, c10::toString(input.scalar_type()),
        fmt::join(input.sizes().begin(), input.sizes().end(), ", "), options.num_features));
  }
  double momentum = options.momentum.value_or(0);
  if (is_training() && num_batches_tracked.defined()) {
    num_batches_tracked += 1;
    if (!options.momentum) momentum = 1 / num_batches_tracked.item<double>();
  }
  const bool from_batch = is_training() || !running_mean.defined();
  if (is_training() && get_world_size(options.process_group) > 1) {
    return sync_batch_norm::normalize(input, {weight, bias, running_mean, running_var}, momentum,
                                      options.eps, options.process_group);
  }
  return at::batch_norm(input, weight, bias, running_mean, running_var, from_batch, momentum,
                        options.eps, false);
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << fmt::format(
      "paceline::SyncBatchNorm({}, eps={}, momentum={}, affine={}, "
      "track_running_stats={})",
      options.num_features, options.eps,
      options.momentum ? fmt::to_string(*options.momentum) : "None", options.affine,
      options.track_running_stats);
}

}  // namespace paceline
