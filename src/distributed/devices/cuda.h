#pragma once

#include <string>

namespace paceline::distributed {

// CUDA in this process. LibTorch's part for it, libtorch_cuda.so, is loaded when it is first asked
// for, so that programs run without it where there is no GPU.
struct Cuda {
  int devices = 0;
  std::string why_not{};  // why there are no devices; empty if there are some

  // Loads libtorch_cuda.so once, if a driver and a device are there. Thread-safe.
  static const Cuda& get();
};

}  // namespace paceline::distributed
