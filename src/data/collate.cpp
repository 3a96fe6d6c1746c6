#include <paceline/collate.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

namespace paceline::data::detail {

at::Tensor stack(const std::vector<at::Tensor>& tensors) {
  return at::stack(tensors);
}

at::Tensor empty_vector(std::int64_t size, at::ScalarType type) {
  return at::empty({size}, at::TensorOptions(type));
}

}  // namespace paceline::data::detail
