#include "parallel/comm_hooks/orthogonalize.h"

#include <ATen/ATen.h>

namespace paceline::comm_hooks {
namespace {

void gram_schmidt(const at::Tensor& matrix, double epsilon) {
  const std::int64_t columns = matrix.size(2);
  for (std::int64_t i = 0; i < columns; ++i) {
    const at::Tensor column = matrix.narrow(2, i, 1);
    const at::Tensor norm = at::linalg_vector_norm(column, 2, at::IntArrayRef{1}, true) + epsilon;
    column.div_(norm).masked_fill_(norm == 0, 0);
    if (i + 1 == columns) break;
    const at::Tensor rest = matrix.narrow(2, i + 1, columns - i - 1);
    rest.sub_((column * rest).sum(1, true) * column);
  }
}

}  // namespace

// Where Gram-Schmidt is used: QR does not take 16 bits, and is faster for more than two columns
// only.
bool keeps_zero_columns(const at::Tensor& matrix) {
  return matrix.size(2) <= 2 || matrix.scalar_type() == at::kHalf ||
         matrix.scalar_type() == at::kBFloat16;
}

void orthogonalize(const at::Tensor& matrix, double epsilon) {
  if (keeps_zero_columns(matrix)) return gram_schmidt(matrix, epsilon);
  matrix.copy_(std::get<0>(at::linalg_qr(matrix)));
}

}  // namespace paceline::comm_hooks
