#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <paceline/collectives.h>

#include <optional>
#include <utility>
#include <vector>

#include "distributed/backend.h"
#include "distributed/debug/flight_recorder.h"
#include "distributed/process_state.h"

namespace paceline::distributed {

// What all public calls share.

using Tensors = std::vector<at::Tensor>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// Null on ranks that are not members: their calls do nothing, as in PyTorch.
BackendPtr backend_of(const ProcessGroup& group, c10::DeviceType device, const char* operation);
c10::DeviceType device_of(const at::Tensor& tensor, const char* operation);
// Backends treat strides differently, and some take only a concatenation or only a stack, or only
// lists of one shape. So every backend gets contiguous tensors, and flat ones where only their
// number of elements counts.
Tensors contiguous(const Tensors& tensors);
// Views of contiguous tensors.
Tensors flat(const Tensors& tensors);

// Throws UsageError if elements of an output overlap.
void check_no_overlap(const at::Tensor& output, const char* operation);

// Starts a call on the backend of its tensors: `outputs` are written, or read and written, `inputs`
// only read. `body` gets the contiguous ones. Each public call has one function that uses start(),
// and two forms: the plain one waits, the `_async` one returns the Work. With asyncOp off, the
// backend may run the call on this thread.
template <typename Start>
Work start(const ProcessGroup& group, const char* operation, Tensors outputs, const Tensors& inputs,
           Start&& body) {
  const at::Tensor* const first = !outputs.empty()  ? &outputs.front()
                                  : !inputs.empty() ? &inputs.front()
                                                    : nullptr;
  const c10::DeviceType device =
      first == nullptr ? c10::DeviceType::CPU : device_of(*first, operation);
  const BackendPtr backend = backend_of(group, device, operation);
  if (!backend) return {};
  // NCCL would wait for a rank that was lost before its first call.
  if (device != c10::DeviceType::CPU && backend->getBackendName() == "nccl")
    check_peers(*group.c10d(), {}, operation);
  return translate_on(device, *group.c10d(), operation, [&] {
    for (const at::Tensor& output : outputs) check_no_overlap(output, operation);
    Tensors to = contiguous(outputs);
    Tensors from = contiguous(inputs);
    std::optional<RecordedCall> call;
    if (any_flight_recorder.load(std::memory_order_relaxed)) {
      call.emplace(group.c10d(), operation, inputs.empty() ? to : from, to);
    }
    auto work = body(*backend, to, from);
    if (call) call->issued(work);
    return Work(std::move(work), std::move(outputs), std::move(to), group);
  });
}

}  // namespace paceline::distributed
