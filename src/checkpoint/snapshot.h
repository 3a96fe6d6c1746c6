#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <vector>

namespace paceline::checkpoint {

// Copies the tensors of a value, into the tensors of the copy before where they fit.
class Snapshot {
 public:
  // On the CPU. Valid until the next call.
  at::IValue copy(const at::IValue& value);

 private:
  at::IValue copied(const at::IValue& value);
  at::Tensor copied(const at::Tensor& tensor);

  std::vector<at::Tensor> tensors_;
  std::size_t next_ = 0;
};

}  // namespace paceline::checkpoint
