#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "shm/kernels/types.h"

namespace paceline::distributed {

// How a type is reduced; throws UsageError if it is not, with this operation.
struct Reduction {
  shm::DataType type;
  shm::ReduceOp op;
};
Reduction reduction(const c10d::ReduceOp& op, at::ScalarType type, const char* operation);
inline Reduction reduction(const c10d::ReduceOp& op, const at::Tensor& tensor,
                           const char* operation) {
  return reduction(op, tensor.scalar_type(), operation);
}

// With PREMUL_SUM each rank's tensor is multiplied by its factor before it is added; with other
// operations this is the tensor itself.
at::Tensor premultiplied(const at::Tensor& tensor, const c10d::ReduceOp& op);

}  // namespace paceline::distributed
