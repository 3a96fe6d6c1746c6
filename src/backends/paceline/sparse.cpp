#include "backends/paceline/sparse.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <paceline/error.h>

#include <algorithm>
#include <numeric>

namespace paceline::backends {
namespace {

constexpr std::int64_t kMaxDimensions = 64;

// What each rank tells: how many values it has, and its shape, which all have to agree on.
at::Tensor describe_shape(const at::Tensor& tensor) {
  std::vector<std::int64_t> row(3 + kMaxDimensions, -1);
  row[0] = tensor._nnz();
  row[1] = tensor.sparse_dim();
  row[2] = tensor.dense_dim();
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), row.begin() + 3);
  return at::tensor(row, at::kLong);
}

at::Tensor gather_rows(node::Group& group, const at::Tensor& rows,
                       const std::vector<std::int64_t>& counts) {
  auto sizes = rows.sizes().vec();
  sizes[0] = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  at::Tensor all = at::empty(sizes, rows.options());
  std::vector<std::int64_t> elements;
  const std::int64_t row = sizes[0] == 0 ? 0 : all.numel() / sizes[0];
  for (const std::int64_t count : counts) elements.push_back(count * row);
  const Flat from(rows, Flat::Use::in);
  const Parts to(all, elements, Flat::Use::out);
  group.all_gather(from.input(), to.outputs(), from.type());
  return all;
}

}  // namespace

void check_sparse(const Tensors& tensors, const c10d::ReduceOp& op) {
  const bool right = tensors.size() == 1 && tensors.front().is_sparse() &&
                     tensors.front().device().is_cpu() && tensors.front().dim() <= kMaxDimensions;
  if (right && op.op_ == c10d::ReduceOp::SUM) return;
  throw UsageError(
      "all_reduce of sparse tensors takes one COO tensor of at most 64 dimensions on the CPU, and "
      "SUM");
}

at::Tensor sum_of_sparse(node::Group& group, const at::Tensor& tensor) {
  const std::int64_t ranks = group.size();
  const at::Tensor shapes =
      gather_rows(group, describe_shape(tensor).unsqueeze(0),
                  std::vector<std::int64_t>(static_cast<std::size_t>(ranks), 1));
  for (std::int64_t rank = 1; rank < ranks; ++rank) {
    if (at::equal(shapes[rank].slice(0, 1), shapes[0].slice(0, 1))) continue;
    throw UsageError(fmt::format(
        "all_reduce of sparse tensors that differ in shape or in their number of sparse "
        "dimensions: those of rank 0 and rank {}",
        group.region()->numbers().of(static_cast<int>(rank))));
  }
  std::vector<std::int64_t> counts;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    counts.push_back(shapes[rank][0].item<std::int64_t>());
  }
  const at::Tensor indices = gather_rows(group, tensor._indices().t().contiguous(), counts);
  const at::Tensor values = gather_rows(group, tensor._values().contiguous(), counts);
  return at::sparse_coo_tensor(indices.t(), values, tensor.sizes()).coalesce();
}

}  // namespace paceline::backends
