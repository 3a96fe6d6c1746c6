#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <vector>

#include "parallel/ddp/model.h"

namespace paceline::parameter_server {

using Tensors = std::vector<at::Tensor>;

// The defined ones, each once. Throws UsageError, as `user`, for a tensor that is not dense or not
// on the CPU.
std::vector<ddp::NamedTensor> distinct_tensors(const std::vector<ddp::NamedTensor>& tensors,
                                               const char* user);

// Tensors of any types one after the other in one piece of memory, as a message carries them; any
// of them may be missing.
class FlatTensors {
 public:
  FlatTensors() = default;  // of none
  // Takes the memory, an uninitialised uint8 tensor, from `allocate`.
  FlatTensors(const Tensors& like, const std::function<at::Tensor(std::size_t bytes)>& allocate);

  // The message.
  const at::Tensor& memory() const { return memory_; }
  // Copies the tensors here; an undefined one is missing.
  void write(const Tensors& tensors);
  // Copies the tensors from here; each must be there.
  void read(const Tensors& tensors) const;
  // In this memory; undefined if it is missing.
  at::Tensor at(std::size_t index) const;

 private:
  at::Tensor memory_;
  at::Tensor present_;  // at its end, a byte for each tensor
  Tensors views_;
};

}  // namespace paceline::parameter_server
