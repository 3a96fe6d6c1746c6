#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <paceline/collectives.h>

#include <utility>
#include <vector>

#include "distributed/process_state.h"
#include "distributed/translate.h"

namespace paceline::distributed {

// What every public call is made of.

using Tensors = std::vector<at::Tensor>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// Null on ranks that are no members: their call does nothing, as in PyTorch.
BackendPtr backend_of(const ProcessGroup& group, c10::DeviceType device, const char* operation);
c10::DeviceType device_of(const at::Tensor& tensor, const char* operation);
// Backends differ in what they make of strides, and in whether they take a concatenation or a
// stack: all of them get contiguous tensors, and for the single-tensor calls flat ones.
Tensors contiguous(const Tensors& tensors);

// Throws UsageError if elements of an output overlap.
void check_no_overlap(const at::Tensor& output, const char* operation);

// Starts a call on the backend of its tensors: `outputs` are written, or read and written, `inputs`
// only read. `body` gets the contiguous ones. A public call has two forms, beside the function that
// starts both: the plain one waits, the other returns the Work. With asyncOp off, the backend may
// do it on this thread.
template <typename Start>
Work start(const ProcessGroup& group, const char* operation, Tensors outputs, const Tensors& inputs,
           Start&& body) {
  const at::Tensor* const first = !outputs.empty()  ? &outputs.front()
                                  : !inputs.empty() ? &inputs.front()
                                                    : nullptr;
  const BackendPtr backend = backend_of(
      group, first == nullptr ? c10::DeviceType::CPU : device_of(*first, operation), operation);
  if (!backend) return {};
  return translate(operation, [&] {
    for (const at::Tensor& output : outputs) check_no_overlap(output, operation);
    Tensors to = contiguous(outputs);
    Tensors from = contiguous(inputs);
    auto work = body(*backend, to, from);
    return Work(std::move(work), std::move(outputs), std::move(to), group);
  });
}

}  // namespace paceline::distributed
