#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <string>

namespace paceline::backends {

// What a plug-in gives that is linked to LibTorch's part for CUDA.
struct NcclPlugin {
  // Why the plug-in must not be used; empty if it may be.
  std::string (*why_not)();
  // LibTorch's own NCCL backend. It keeps what `watch` returns until it is shut down, aborted or
  // destroyed. `abort`, on any thread, ends its calls.
  using Watch = std::function<std::shared_ptr<void>(std::function<void()> abort)>;
  c10::intrusive_ptr<c10d::Backend> (*make)(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                            int size, std::chrono::milliseconds timeout,
                                            const std::string& name, const Watch& watch);
  // Whether ranks of a group may have the same device.
  bool (*shares_devices)();
  // The current device of this thread, by a name that is the same in all processes.
  std::string (*device)();
};

// The one function that the plug-in exports, of type NcclPluginFunction. Its name changes with
// NcclPlugin.
constexpr const char* kNcclPluginFunction = "paceline_nccl_plugin_2";
using NcclPluginFunction = const NcclPlugin* (*)();

}  // namespace paceline::backends
