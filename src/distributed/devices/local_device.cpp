#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <paceline/device.h>
#include <paceline/distributed.h>

#include "distributed/devices/cuda.h"

namespace paceline {
namespace {

c10::Device choose() {
  const int devices = distributed::Cuda::get().devices;
  if (devices == 0) return c10::Device(c10::DeviceType::CPU);
  return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(get_local_rank() % devices)};
}

}  // namespace

c10::Device local_device() {
  const c10::Device device = choose();
  if (device.is_cuda()) c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
  return device;
}

std::string describe_local_device() {
  const auto& cuda = distributed::Cuda::get();
  if (cuda.devices == 0) return fmt::format("the CPU: {}", cuda.why_not);
  const int ranks = get_local_world_size();
  std::string text =
      fmt::format("{}: local rank {} of {}, and this process sees {} CUDA device{}", choose().str(),
                  get_local_rank(), ranks, cuda.devices, cuda.devices == 1 ? "" : "s");
  if (ranks > cuda.devices) text += ", so ranks may share devices";
  return text;
}

}  // namespace paceline
