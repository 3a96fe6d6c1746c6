#pragma once

#include <ATen/core/Tensor.h>

namespace paceline::comm_hooks {

// Makes the columns of a matrix orthonormal, in place. `matrix`: 1 x n x r, r at most n. `epsilon`
// is added to the norms that columns are divided by. PyTorch's _orthogonalize, but for columns of
// zeros, which stay zero.
void orthogonalize(const at::Tensor& matrix, double epsilon);

// Whether orthogonalize leaves columns of zeros as they are. A QR decomposition does not.
bool keeps_zero_columns(const at::Tensor& matrix);

}  // namespace paceline::comm_hooks
