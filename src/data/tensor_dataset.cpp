#include <paceline/tensor_dataset.h>

#include <ATen/ops/index_select.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>

#include <paceline/error.h>

#include "data/check_index.h"

namespace paceline::data::detail {

std::int64_t check_tensors(std::span<const at::Tensor> tensors) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].defined() || tensors[i].dim() == 0) {
      throw UsageError(fmt::format(
          "TensorDataset: tensor {} has no dimension; the first one counts the samples", i));
    }
    if (tensors[i].size(0) == tensors[0].size(0)) continue;
    throw UsageError(
        fmt::format("TensorDataset: tensor {} has {} samples, and tensor 0 has {}; the sizes of "
                    "the first dimension must be equal",
                    i, tensors[i].size(0), tensors[0].size(0)));
  }
  return tensors[0].size(0);
}

at::Tensor select_row(const at::Tensor& tensor, std::int64_t index) {
  check_index("TensorDataset", index, tensor.size(0));
  return tensor.select(0, index);
}

at::Tensor select_rows(const at::Tensor& tensor, std::span<const std::int64_t> indices) {
  for (const std::int64_t index : indices) check_index("TensorDataset", index, tensor.size(0));
  const at::Tensor rows = at::tensor(at::ArrayRef<std::int64_t>(indices.data(), indices.size()));
  return at::index_select(tensor, 0, rows.to(tensor.device()));
}

}  // namespace paceline::data::detail
