#include <paceline/data_parallel.h>

#include <c10/core/InferenceMode.h>
#include <fmt/format.h>

#include <utility>

#include <paceline/error.h>

#include "distributed/translate.h"
#include "parallel/data_parallel/core.h"
#include "parallel/data_parallel/devices.h"

namespace paceline::detail {
namespace {

constexpr const char* kUser = "DataParallel";

std::shared_ptr<torch::nn::Module> clone_of(const torch::nn::Module& module,
                                            const at::Device& device) {
  try {
    return module.clone(device);
  } catch (const c10::Error&) {
    throw UsageError(
        fmt::format("DataParallel: clone() of the module fails: {} Register all parameters, "
                    "buffers and submodules in reset(), or pass a function that makes a module",
                    distributed::current_exception_text()));
  }
}

}  // namespace

DataParallelHandle::DataParallelHandle(std::shared_ptr<torch::nn::Module> module,
                                       const DataParallelOptions& options) {
  const c10::InferenceMode normal(false);  // replicas may train later
  checked_module(module, kUser);
  const auto devices = data_parallel::choose_devices(*module, options);
  data_parallel::Replicas::Modules replicas;
  for (const at::Device& device : devices) replicas.push_back(clone_of(*module, device));
  core_ =
      std::make_unique<DataParallelCore>(std::move(module), std::move(replicas), devices, options);
}

DataParallelHandle::DataParallelHandle(const Factory& factory, const DataParallelOptions& options) {
  const c10::InferenceMode normal(false);
  if (!factory) throw UsageError("DataParallel: the function that makes a module is empty");
  auto module = factory();
  checked_module(module, kUser);
  const auto devices = data_parallel::choose_devices(*module, options);
  data_parallel::Replicas::Modules replicas;
  for (const at::Device& device : devices) {
    replicas.push_back(factory());
    checked_module(replicas.back(), kUser).to(device);
  }
  core_ =
      std::make_unique<DataParallelCore>(std::move(module), std::move(replicas), devices, options);
}

DataParallelHandle::DataParallelHandle(DataParallelHandle&&) noexcept = default;
DataParallelHandle& DataParallelHandle::operator=(DataParallelHandle&&) noexcept = default;
DataParallelHandle::~DataParallelHandle() = default;

const std::shared_ptr<torch::nn::Module>& DataParallelHandle::module() const {
  return core_->replicas().module();
}
const std::vector<std::shared_ptr<torch::nn::Module>>& DataParallelHandle::replicas() const {
  return core_->replicas().modules();
}
DataParallelHandle::Tensors DataParallelHandle::run(const Tensors& tensors, std::size_t most,
                                                    const Call& call) {
  return core_->run(tensors, most, call);
}
const DataParallelStats& DataParallelHandle::stats() const {
  return core_->stats();
}

}  // namespace paceline::detail
