#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace paceline::data_parallel {

// How the parts of one tensor are put together along a dimension. Scalars become a vector, and a
// single part stays as it is.
class Concatenation {
 public:
  // `parts`: by replica. Throws UsageError if they cannot be put together; `index` is the number
  // of the output in the message.
  Concatenation(const std::vector<at::Tensor>& parts, std::int64_t dim, std::size_t index);

  // The whole tensor, on the device of the first part. Undefined if all parts are.
  at::Tensor join(std::vector<at::Tensor> parts) const;
  // The replica's part of a tensor of the whole shape.
  at::Tensor part_of(const at::Tensor& whole, std::size_t replica) const;

 private:
  std::int64_t dim_;
  bool defined_;
  bool is_alone_;
  bool scalars_ = false;
  std::vector<std::int64_t> sizes_;  // by replica, along the dimension
};

}  // namespace paceline::data_parallel
