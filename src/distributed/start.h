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
inline Tensors with(const at::Tensor& first, const Tensors& others) {
  Tensors all{first};
  all.insert(all.end(), others.begin(), others.end());
  return all;
}

// Backends differ in what they make of strides, and in whether they take a concatenation or a
// stack: all of them get contiguous tensors, and for the single-tensor calls flat ones.
Tensors contiguous(const Tensors& tensors);

// Starts a call on the backend of its tensors, of which `body` gets the contiguous ones. Every
// public call is this twice: started, and waited for unless it is asynchronous. With asyncOp off,
// the backend may do it on this thread.
template <typename Start>
Work start(const ProcessGroup& group, const char* operation, Tensors tensors, Start&& body) {
  const BackendPtr backend = backend_of(
      group, tensors.empty() ? c10::DeviceType::CPU : device_of(tensors[0], operation), operation);
  if (!backend) return {};
  auto dense = translate(operation, [&] { return contiguous(tensors); });
  auto work = translate(operation, [&] { return body(*backend, dense); });
  return {std::move(work), std::move(tensors), std::move(dense), group};
}

}  // namespace paceline::distributed
