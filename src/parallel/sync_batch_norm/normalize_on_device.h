#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "parallel/sync_batch_norm/normalize.h"

namespace paceline::sync_batch_norm {

// normalize() for tensors on a CUDA device, by LibTorch's kernels for it.
at::Tensor normalize_on_device(const at::Tensor& input, const Parts& parts, double momentum,
                               double eps, const ProcessGroup& group);

inline std::optional<at::Tensor> if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

// What both check. Throws UsageError if all ranks together have too few values for each channel.
void check_count(double total);
// Call in a backward. Throws UsageError if it has a graph.
void check_no_second_derivative();

}  // namespace paceline::sync_batch_norm
