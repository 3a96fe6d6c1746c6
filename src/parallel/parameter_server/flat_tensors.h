#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <vector>

namespace paceline::parameter_server {

using Tensors = std::vector<at::Tensor>;

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
  std::size_t size() const { return views_.size(); }

 private:
  at::Tensor memory_;
  at::Tensor present_;  // at its end, a byte for each tensor
  Tensors views_;
};

}  // namespace paceline::parameter_server
