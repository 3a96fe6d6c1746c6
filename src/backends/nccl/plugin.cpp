#include "backends/nccl/plugin.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAFunctions.h>

#include <fmt/format.h>
#include <nccl.h>
#include <torch/csrc/cuda/nccl.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <utility>

namespace paceline::backends {
namespace {

// As torch::cuda::nccl::version() has it, without the patch.
constexpr int kMajor = 32;
constexpr int kMinor = 16;
constexpr std::uint64_t version_of(std::uint64_t major, std::uint64_t minor) {
  return major << kMajor | minor << kMinor;
}

// The classes of c10d contain NCCL's structures, whose size changes with its version: an object
// made here would be too small or too large for LibTorch's code.
std::string why_not() {
  const std::uint64_t theirs = torch::cuda::nccl::version();
  if (theirs >> kMinor == version_of(NCCL_MAJOR, NCCL_MINOR) >> kMinor) return {};
  return fmt::format(
      "this build's plug-in for NCCL was compiled with nccl.h of version {}.{}, and LibTorch with "
      "{}.{}: build Paceline with that version's header (the package nvidia-nccl beside LibTorch "
      "has it)",
      NCCL_MAJOR, NCCL_MINOR, theirs >> kMajor, theirs >> kMinor & 0xffff);
}

// NCCL's own variable, which it reads since this version.
bool shares_devices() {
  const char* const share = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return torch::cuda::nccl::version() >= version_of(2, 30) && share != nullptr &&
         share == std::string_view("1");
}

class WatchedBackend final : public c10d::ProcessGroupNCCL {
 public:
  WatchedBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                 c10::intrusive_ptr<Options> options, const NcclPlugin::Watch& watch)
      : ProcessGroupNCCL(store, rank, size, std::move(options)),
        watch_(watch([this] { ProcessGroupNCCL::abort(); })) {}

  void shutdown() override {
    // While it is watched: a rank may be lost that these calls need.
    const c10::DeviceGuard guard({c10::DeviceType::CUDA, device_});
    if (watch_ != nullptr) c10::cuda::device_synchronize();
    watch_.reset();
    ProcessGroupNCCL::shutdown();
  }
  void abort() override {
    watch_.reset();
    ProcessGroupNCCL::abort();
  }

 private:
  c10::DeviceIndex device_ = c10::cuda::current_device();
  std::shared_ptr<void> watch_;
};

c10::intrusive_ptr<c10d::Backend> make(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                       int size, std::chrono::milliseconds timeout,
                                       const std::string& name, const NcclPlugin::Watch& watch) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  options->group_name = name;
  return c10::make_intrusive<WatchedBackend>(store, rank, size, std::move(options), watch);
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

constexpr NcclPlugin kPlugin{
    .why_not = &why_not, .make = &make, .shares_devices = &shares_devices, .device = &device};

}  // namespace
}  // namespace paceline::backends

extern "C" __attribute__((visibility("default"))) const paceline::backends::NcclPlugin*
paceline_nccl_plugin_2() {
  return &paceline::backends::kPlugin;
}
