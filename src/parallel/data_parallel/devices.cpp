#include "parallel/data_parallel/devices.h"

#include <ATen/Parallel.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include <paceline/error.h>

#include "base/cores.h"

namespace paceline::data_parallel {
namespace {

// Unset for a module without tensors.
std::optional<at::Device> device_of(const torch::nn::Module& module) {
  for (const auto& tensors : {module.parameters(), module.buffers()}) {
    if (!tensors.empty()) return tensors.front().device();
  }
  return std::nullopt;
}

std::vector<at::Device> all_devices(at::DeviceType type) {
  std::vector<at::Device> devices;
  for (at::DeviceIndex i = 0; i < c10::impl::VirtualGuardImpl(type).deviceCount(); ++i) {
    devices.emplace_back(type, i);
  }
  return devices;
}

// Two replicas would wait for each other in a backward, since autograd has one thread for each.
void check_distinct(const std::vector<at::Device>& devices) {
  for (auto device = devices.begin(); device != devices.end(); ++device) {
    if (device->is_cpu() || std::count(device, devices.end(), *device) == 1) continue;
    throw UsageError(fmt::format(
        "DataParallel: device_ids has {} twice; an accelerator takes one replica", device->str()));
  }
}

std::vector<at::Device> default_devices(const std::optional<at::Device>& module, int wanted) {
  if (!module || module->is_cpu()) {
    const int number =
        wanted > 0 ? wanted : std::min(at::get_num_threads(), base::available_cores());
    return std::vector<at::Device>(static_cast<std::size_t>(number), at::kCPU);
  }
  if (wanted == 0) return all_devices(module->type());
  throw UsageError(fmt::format(
      "DataParallel: num_replicas is for modules on the CPU, and this one is on {}; set "
      "device_ids",
      module->str()));
}

}  // namespace

std::vector<at::Device> choose_devices(const torch::nn::Module& module,
                                       const DataParallelOptions& options) {
  if (options.num_replicas < 0) {
    throw UsageError(
        fmt::format("DataParallel: num_replicas is {}; it must be positive, or 0 for one per core",
                    options.num_replicas));
  }
  if (options.num_replicas > 0 && !options.device_ids.empty()) {
    throw UsageError(
        "DataParallel: set device_ids or num_replicas, not both: each of the device_ids has one "
        "replica");
  }
  check_distinct(options.device_ids);
  const auto device = device_of(module);
  auto devices = options.device_ids;
  if (devices.empty()) devices = default_devices(device, options.num_replicas);
  if (!device || *device == devices.front()) return devices;
  throw UsageError(
      fmt::format("DataParallel: the module is on {}; it must be on {}, the first of "
                  "its replicas' devices",
                  device->str(), devices.front().str()));
}

}  // namespace paceline::data_parallel
