#include "parallel/data_parallel/scatter.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/chunk.h>
#include <fmt/format.h>
#include <fmt/ostream.h>

#include <optional>

#include <paceline/error.h>

namespace paceline::data_parallel {
namespace {

void check_has_dim(const at::Tensor& tensor, std::size_t index, std::int64_t dim) {
  if (-tensor.dim() <= dim && dim < tensor.dim()) return;
  throw UsageError(fmt::format(
      "DataParallel: tensor {} of the arguments has the shape {} and no dimension {} to be split "
      "along; pass a number as a number, or expand the tensor to the batch's size",
      index, fmt::streamed(tensor.sizes()), dim));
}

// The index of the first tensor that is defined.
std::optional<std::size_t> check_sizes(const std::vector<at::Tensor>& tensors, std::int64_t dim) {
  std::optional<std::size_t> first;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined()) continue;
    check_has_dim(tensors[i], i, dim);
    if (!first) first = i;
    const at::Tensor& other = tensors[*first];
    if (other.size(dim) == tensors[i].size(dim)) continue;
    throw UsageError(fmt::format(
        "DataParallel: the tensors {} and {} of the arguments, of shapes {} and {}, have {} and {} "
        "samples along dimension {}; they must have as many",
        *first, i, fmt::streamed(other.sizes()), fmt::streamed(tensors[i].sizes()), other.size(dim),
        tensors[i].size(dim), dim));
  }
  return first;
}

}  // namespace

ScatteredBatch scatter(const std::vector<at::Tensor>& tensors, std::int64_t dim,
                       const std::vector<at::Device>& devices) {
  const auto first = check_sizes(tensors, dim);
  const bool records = at::GradMode::is_enabled();
  const at::AutoGradMode no_grad(false);
  ScatteredBatch batch;
  batch.parts.resize(devices.size(), std::vector<at::Tensor>(tensors.size()));
  batch.samples.resize(devices.size(), 0);
  if (!first) return batch;
  for (std::size_t i = *first; i < tensors.size(); ++i) {
    if (!tensors[i].defined()) continue;
    const auto chunks = tensors[i].chunk(static_cast<std::int64_t>(devices.size()), dim);
    batch.parts.resize(chunks.size());
    for (std::size_t r = 0; r < chunks.size(); ++r) {
      at::Tensor& part = batch.parts[r][i];
      part = chunks[r].detach().to(devices[r]);
      if (records && tensors[i].requires_grad()) part.requires_grad_();
      batch.samples[r] = part.size(dim);
    }
  }
  batch.samples.resize(batch.parts.size());
  return batch;
}

}  // namespace paceline::data_parallel
