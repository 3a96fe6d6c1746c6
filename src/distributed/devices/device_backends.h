#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <string>

#include "distributed/backend.h"

namespace paceline::distributed {

// The names of a group's backends, by the type of the device of a call's tensors.
struct DeviceBackends {
  std::string cpu;
  // "nccl", or the same as `cpu`, which then takes CUDA tensors too.
  std::string cuda;
};

// Parses the name of one backend, or PyTorch's "cpu:paceline,cuda:nccl". A single name stands for
// both devices, but "nccl" has paceline beside it. Throws UsageError for other texts.
DeviceBackends parse_backends(const std::string& text);

// Gives the group its backend for CUDA tensors. `host`: the backend for CPU tensors.
void add_cuda_backend(c10d::ProcessGroup& group, const DeviceBackends& names,
                      const c10::intrusive_ptr<c10d::Backend>& host, BackendRequest request);

}  // namespace paceline::distributed
