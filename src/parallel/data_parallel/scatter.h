#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace paceline::data_parallel {

// The tensors of a batch, split among replicas.
struct ScatteredBatch {
  std::vector<std::vector<at::Tensor>> parts;  // by replica, then by tensor
  std::vector<std::int64_t> samples;           // by replica
};

// Splits tensors along `dim` into as many chunks as there are devices, or fewer, as at::chunk does.
// Parts are leaves of graphs of their own if grad mode is on and the tensor requires a gradient.
// Without tensors, each device has an empty list. Throws UsageError if the tensors differ in size
// along `dim`, or do not have that dimension.
ScatteredBatch scatter(const std::vector<at::Tensor>& tensors, std::int64_t dim,
                       const std::vector<at::Device>& devices);

}  // namespace paceline::data_parallel
