#include "backends/nccl/plugin.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAFunctions.h>
#include <fmt/format.h>
#include <nccl.h>
#include <torch/csrc/cuda/nccl.h>

#include <cstdint>

#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <utility>

namespace paceline::backends {
namespace {

// The classes of c10d contain NCCL's structures, whose size changes with its version: an object
// made here would be too small or too large for LibTorch's code.
std::string why_not() {
  constexpr int kMajor = 32;
  constexpr int kMinor = 16;
  const std::uint64_t theirs = torch::cuda::nccl::version();
  const std::uint64_t ours = std::uint64_t{NCCL_MAJOR} << kMajor | std::uint64_t{NCCL_MINOR}
                                                                       << kMinor;
  if (theirs >> kMinor == ours >> kMinor) return {};
  return fmt::format(
      "this build's plug-in for NCCL was compiled with nccl.h of version {}.{}, and LibTorch with "
      "{}.{}: build Paceline with that version's header (the package nvidia-nccl beside LibTorch "
      "has it)",
      NCCL_MAJOR, NCCL_MINOR, theirs >> kMajor, theirs >> kMinor & 0xffff);
}

c10::intrusive_ptr<c10d::Backend> make(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                       int size, std::chrono::milliseconds timeout,
                                       const std::string& name) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  options->group_name = name;
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, std::move(options));
}

std::string device() {
  constexpr std::string_view kDigits = "0123456789abcdef";
  const cudaDeviceProp* const properties =
      at::cuda::getDeviceProperties(c10::cuda::current_device());
  std::string uuid;
  for (const char byte : properties->uuid.bytes) {
    uuid += kDigits[static_cast<unsigned char>(byte) >> 4];
    uuid += kDigits[static_cast<unsigned char>(byte) & 15];
  }
  return uuid;
}

constexpr NcclPlugin kPlugin{.why_not = &why_not, .make = &make, .device = &device};

}  // namespace
}  // namespace paceline::backends

extern "C" __attribute__((visibility("default"))) const paceline::backends::NcclPlugin*
paceline_nccl_plugin_1() {
  return &paceline::backends::kPlugin;
}
