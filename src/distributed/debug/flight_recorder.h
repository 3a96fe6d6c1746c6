#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <cstdint>
#include <vector>

namespace paceline::distributed {

// PyTorch's flight recorder of the calls of groups made here, if TORCH_FR_BUFFER_SIZE or
// TORCH_NCCL_TRACE_BUFFER_SIZE is set and not 0. PyTorch records by default; here a call of a few
// bytes would cost a multiple. A backend that records its calls itself, as gloo does, is left
// alone.
void attach_flight_recorder(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                            const std::vector<int>& global_ranks);
// Call before the group's backends shut down.
void detach_flight_recorder(c10d::ProcessGroup& group) noexcept;

// Whether any group of this process has ever been recorded.
inline std::atomic<bool> any_flight_recorder{false};

// A call, for the recorder of its group, if there is one: our calls do not pass c10d's dispatcher,
// which records others.
class RecordedCall {
 public:
  using Tensors = std::vector<at::Tensor>;

  RecordedCall(c10::intrusive_ptr<c10d::ProcessGroup> group, const char* operation,
               const Tensors& inputs, const Tensors& outputs);
  void issued(const c10::intrusive_ptr<c10d::Work>& work);

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  c10d::HookOpName name_;
  std::int64_t id_;
};

}  // namespace paceline::distributed
