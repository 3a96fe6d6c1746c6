#include "backends/paceline/sparse.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <paceline/error.h>

#include <algorithm>
#include <numeric>

namespace paceline::backends {
namespace {

constexpr std::int64_t kMaxDimensions = 64;

// A rank's row: the number of its values, and what all ranks must agree on.
enum Row { kValues, kType, kSparseDimensions, kDenseDimensions, kSizes };

at::Tensor describe_shape(const at::Tensor& tensor) {
  std::vector<std::int64_t> row(kSizes + kMaxDimensions, -1);
  row[kValues] = tensor._nnz();
  row[kType] = static_cast<std::int64_t>(tensor.scalar_type());
  row[kSparseDimensions] = tensor.sparse_dim();
  row[kDenseDimensions] = tensor.dense_dim();
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), row.begin() + kSizes);
  return at::tensor(row, at::kLong);
}

std::string in_words(const at::Tensor& row) {
  const auto* const told = row.const_data_ptr<std::int64_t>();
  const auto dimensions =
      std::clamp<std::int64_t>(told[kSparseDimensions] + told[kDenseDimensions], 0, kMaxDimensions);
  return fmt::format("all_reduce of a sparse {} tensor of [{}] with {} sparse dimensions",
                     c10::toString(static_cast<at::ScalarType>(told[kType])),
                     fmt::join(told + kSizes, told + kSizes + dimensions, ", "),
                     told[kSparseDimensions]);
}

void check_shapes(shm::Collectives& group, const at::Tensor& shapes) {
  std::vector<std::string> words;
  for (std::int64_t rank = 0; rank < group.size(); ++rank) words.push_back(in_words(shapes[rank]));
  if (std::equal(words.begin() + 1, words.end(), words.begin())) return;
  const auto found = shm::explain_disagreement(words, group.global_ranks());
  group.fail(found.ranks, found.text);
}

at::Tensor gather_rows(shm::Collectives& group, const at::Tensor& rows,
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

at::Tensor sum_of_sparse(shm::Collectives& group, const at::Tensor& tensor) {
  const std::int64_t ranks = group.size();
  const at::Tensor shapes =
      gather_rows(group, describe_shape(tensor).unsqueeze(0),
                  std::vector<std::int64_t>(static_cast<std::size_t>(ranks), 1));
  check_shapes(group, shapes);
  std::vector<std::int64_t> counts;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    counts.push_back(shapes[rank][kValues].item<std::int64_t>());
  }
  const at::Tensor indices = gather_rows(group, tensor._indices().t().contiguous(), counts);
  const at::Tensor values = gather_rows(group, tensor._values().contiguous(), counts);
  return at::sparse_coo_tensor(indices.t(), values, tensor.sizes()).coalesce();
}

}  // namespace paceline::backends
