#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

namespace paceline::distributed {

// Pins a CPU tensor's memory for CUDA while this lives, so that copies are asynchronous. Does
// nothing if the memory is pinned already, or if it shares pages with other memory.
class PinnedMemory {
 public:
  explicit PinnedMemory(at::Tensor tensor);
  PinnedMemory(PinnedMemory&& other) noexcept
      : tensor_(std::move(other.tensor_)), pinned_(std::exchange(other.pinned_, false)) {}
  PinnedMemory& operator=(PinnedMemory&&) = delete;
  ~PinnedMemory();

  bool is_pinned() const { return pinned_; }

 private:
  at::Tensor tensor_;
  bool pinned_ = false;
};

}  // namespace paceline::distributed
