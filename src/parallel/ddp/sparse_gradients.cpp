#include "parallel/ddp/sparse_gradients.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

#include <algorithm>

#include <paceline/collectives.h>

#include "parallel/gather.h"

namespace paceline::ddp {
namespace {

// A sparse gradient of zero, like an embedding's.
at::Tensor zeros_for(const at::Tensor& parameter) {
  return at::_sparse_coo_tensor_with_dims(1, parameter.dim() - 1, parameter.sizes(),
                                          parameter.options().layout(at::kSparse).device(at::kCPU));
}

// On the CPU.
at::Tensor as_sparse(const at::Tensor& gradient, const at::Tensor& parameter) {
  if (!gradient.defined()) return zeros_for(parameter);
  return (gradient.is_sparse() ? gradient : gradient.to_sparse(1)).cpu().coalesce();
}

// A leaf of the sum: some rows of the gradient.
struct Leaf {
  at::Tensor rows;    // their numbers, ascending
  at::Tensor values;  // weighted, in accumulation type
  double weight;
};

Leaf make_leaf(const at::Tensor& gradient, const at::Tensor& parameter, double weight) {
  const at::Tensor sparse = as_sparse(weight == 0 ? at::Tensor() : gradient, parameter);
  const at::Tensor values = sparse._values().to(at::toOpMathType(parameter.scalar_type()));
  return {sparse._indices().select(0, 0), values.mul(weight), weight};
}

// Pads to `rows` rows.
at::Tensor padded(const at::Tensor& tensor, std::int64_t rows) {
  auto sizes = tensor.sizes().vec();
  sizes[0] = rows;
  at::Tensor result = at::zeros(sizes, tensor.options());
  result.narrow(0, 0, tensor.size(0)).copy_(tensor);
  return result;
}

std::vector<Leaf> gather_leaves(const std::vector<Leaf>& own, const shm::LeafPlan& plan,
                                const ProcessGroup& group) {
  const at::Tensor report = at::zeros({plan.most_leaves(), 2}, at::kDouble);
  std::vector<at::Tensor> rows;
  std::vector<at::Tensor> values;
  for (std::size_t k = 0; k < own.size(); ++k) {
    const auto at = static_cast<std::int64_t>(k);
    report[at][0] = static_cast<double>(own[k].rows.numel());
    report[at][1] = own[k].weight;
    rows.push_back(own[k].rows);
    values.push_back(own[k].values);
  }
  const at::Tensor reports = parallel::gather(report, group);
  const auto most = static_cast<std::int64_t>(reports.select(2, 0).sum(1).max().item<double>());
  const at::Tensor all_rows = parallel::gather(padded(at::cat(rows), most), group);
  const at::Tensor all_values = parallel::gather(padded(at::cat(values), most), group);

  std::vector<Leaf> leaves(static_cast<std::size_t>(plan.leaves()));
  for (int rank = 0; rank < get_world_size(group); ++rank) {
    const auto [first, count] = plan.range(rank);
    std::int64_t begin = 0;
    for (int k = 0; k < count; ++k) {
      const auto number = static_cast<std::int64_t>(reports[rank][k][0].item<double>());
      const auto leaf = static_cast<std::size_t>(first) + static_cast<std::size_t>(k);
      leaves[leaf] = {all_rows[rank].narrow(0, begin, number),
                      all_values[rank].narrow(0, begin, number),
                      reports[rank][k][1].item<double>()};
      begin += number;
    }
  }
  return leaves;
}

// The root of the tree over `leaves`.
at::Tensor sum_of(std::vector<at::Tensor> nodes) {
  while (nodes.size() > 1) {
    std::vector<at::Tensor> above;
    for (std::size_t i = 0; i < nodes.size(); i += 2) {
      above.push_back(i + 1 < nodes.size() ? (nodes[i] + nodes[i + 1]).coalesce() : nodes[i]);
    }
    nodes = std::move(above);
  }
  return nodes[0];
}

}  // namespace

void reduce_sparse_leaves(const std::vector<NamedTensor>& parameters, const SparseLeaves& leaves,
                          std::span<const double> weights, bool sums, const std::vector<bool>& used,
                          const shm::LeafPlan& plan, const ProcessGroup& group) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i].tensor;
    if (!parameters[i].sparse || !used[i]) continue;
    std::vector<Leaf> own;
    for (std::size_t k = 0; k < leaves.size(); ++k) {
      own.push_back(make_leaf(leaves[k][i], parameter, weights.empty() ? 1 : weights[k]));
    }
    double divisor = 0;
    std::vector<at::Tensor> nodes;
    for (const Leaf& leaf : gather_leaves(own, plan, group)) {
      divisor += leaf.weight;
      nodes.push_back(at::_sparse_coo_tensor_unsafe(
          leaf.rows.unsqueeze(0), leaf.values, parameter.sizes(), leaf.values.options(), true));
    }
    at::Tensor sum = sum_of(std::move(nodes));
    if (!sums) sum = sum.div(divisor);
    parameter.mutable_grad() = sum.to(parameter.device(), parameter.scalar_type());
  }
}

void reduce_sparse(const std::vector<NamedTensor>& parameters, const std::vector<bool>& used,
                   double share, const ProcessGroup& group) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i].tensor;
    if (!parameters[i].sparse || !used[i]) continue;
    at::Tensor& grad = parameter.mutable_grad();
    // The gradients of a rank without samples may not even be finite.
    const at::Tensor part =
        share == 0 ? zeros_for(parameter) : as_sparse(grad, parameter).mul(share);
    all_reduce(part, {.group = group});
    grad = part.to(parameter.device());
  }
}

void reduce_sparse_zeros(const std::vector<NamedTensor>& parameters, const std::vector<bool>& used,
                         const ProcessGroup& group) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].sparse && used[i]) {
      all_reduce(zeros_for(parameters[i].tensor), {.group = group});
    }
  }
}

}  // namespace paceline::ddp
