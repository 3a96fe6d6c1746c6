#include "parallel/data_parallel/gather.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <fmt/format.h>
#include <fmt/ostream.h>

#include <numeric>

#include <paceline/error.h>

namespace paceline::data_parallel {
namespace {

std::string shape_of(const at::Tensor& tensor) {
  return tensor.defined() ? fmt::format("the shape {}", fmt::streamed(tensor.sizes())) : "no value";
}

bool fits(const at::Tensor& part, const at::Tensor& first, std::int64_t dim) {
  if (part.defined() != first.defined()) return false;
  if (!part.defined()) return true;
  if (part.dim() != first.dim()) return false;
  for (std::int64_t d = 0; d < part.dim(); ++d) {
    const bool is_dim = d == dim || d == dim + part.dim();
    if (!is_dim && part.size(d) != first.size(d)) return false;
  }
  return true;
}

}  // namespace

Concatenation::Concatenation(const std::vector<at::Tensor>& parts, std::int64_t dim,
                             std::size_t index)
    : dim_(dim), defined_(parts[0].defined()), is_alone_(parts.size() == 1) {
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (fits(parts[i], parts[0], dim)) continue;
    throw UsageError(
        fmt::format("DataParallel: tensor {} of the outputs has {} in replica 0, and {} in replica "
                    "{}; they must be equal but for the size of dimension {}",
                    index, shape_of(parts[0]), shape_of(parts[i]), i, dim));
  }
  if (!defined_ || is_alone_) return;
  scalars_ = parts[0].dim() == 0;
  if (scalars_) return;
  if (dim < -parts[0].dim() || dim >= parts[0].dim()) {
    throw UsageError(
        fmt::format("DataParallel: tensor {} of the outputs has {} and no dimension {} to be "
                    "concatenated along",
                    index, shape_of(parts[0]), dim));
  }
  for (const at::Tensor& part : parts) sizes_.push_back(part.size(dim));
}

at::Tensor Concatenation::join(std::vector<at::Tensor> parts) const {
  if (!defined_) return {};
  if (is_alone_) return parts[0].detach();  // what autograd gives a graph of its own
  for (at::Tensor& part : parts) part = part.to(parts[0].device());
  return scalars_ ? at::stack(parts) : at::cat(parts, dim_);
}

at::Tensor Concatenation::part_of(const at::Tensor& whole, std::size_t replica) const {
  if (is_alone_) return whole;
  if (scalars_) return whole.select(0, static_cast<std::int64_t>(replica));
  const auto at = sizes_.begin() + static_cast<std::ptrdiff_t>(replica);
  return whole.narrow(dim_, std::accumulate(sizes_.begin(), at, std::int64_t{0}), *at);
}

}  // namespace paceline::data_parallel
