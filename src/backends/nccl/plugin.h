#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

namespace paceline::backends {

// What a plug-in gives that is linked to LibTorch's part for CUDA.
struct NcclPlugin {
  // Why the plug-in must not be used; empty if it may be.
  std::string (*why_not)();
  // LibTorch's own NCCL backend.
  c10::intrusive_ptr<c10d::Backend> (*make)(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                            int size, std::chrono::milliseconds timeout,
                                            const std::string& name);
  // The current device of this thread, by a name that is the same in all processes.
  std::string (*device)();
};

// The one function that the plug-in exports, of type NcclPluginFunction. Its name changes with
// NcclPlugin.
constexpr const char* kNcclPluginFunction = "paceline_nccl_plugin_1";
using NcclPluginFunction = const NcclPlugin* (*)();

}  // namespace paceline::backends
