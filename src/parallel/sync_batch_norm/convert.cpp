#include <ATen/ATen.h>
#include <ATen/NativeFunctions.h>
#include <fmt/format.h>
#include <torch/library.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/instancenorm.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <unordered_map>
#include <vector>

#include <paceline/error.h>
#include <paceline/sync_batch_norm.h>

#include "base/log.h"
#include "parallel/sync_batch_norm/normalize.h"

namespace paceline {
namespace {

// The converted modules, by their running mean: it shows which calls of batch_norm are theirs.
class Converted {
 public:
  static Converted& instance() {
    static auto* const all = new Converted;
    return *all;
  }

  void add(const at::Tensor& key, const ProcessGroup& group) {
    const std::lock_guard lock(mutex_);
    std::erase_if(groups_, [](const auto& entry) { return entry.second.key.expired(); });
    groups_.insert_or_assign(key.unsafeGetTensorImpl(),
                             Entry{c10::weak_intrusive_ptr(key.getIntrusivePtr()), group});
  }

  std::optional<ProcessGroup> find(const at::Tensor& key) {
    const std::lock_guard lock(mutex_);
    const auto found = groups_.find(key.unsafeGetTensorImpl());
    if (found == groups_.end() || found->second.key.expired()) return std::nullopt;
    return found->second.group;
  }

 private:
  struct Entry {
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> key;
    ProcessGroup group;
  };
  std::mutex mutex_;
  std::unordered_map<const void*, Entry> groups_;
};

using Optional = std::optional<at::Tensor>;

at::Tensor batch_norm(const at::Tensor& input, const Optional& weight, const Optional& bias,
                      const Optional& running_mean, const Optional& running_var, bool training,
                      double momentum, double eps, bool cudnn_enabled) {
  const auto tensor = [](const Optional& optional) { return optional.value_or(at::Tensor()); };
  if (training && running_mean && running_mean->defined()) {
    const auto group = Converted::instance().find(*running_mean);
    if (group && get_world_size(*group) > 1) {
      return sync_batch_norm::normalize(
          input, {tensor(weight), tensor(bias), tensor(running_mean), tensor(running_var)},
          momentum, eps, *group);
    }
  }
  return at::native::batch_norm(input, weight, bias, running_mean, running_var, training, momentum,
                                eps, cudnn_enabled);
}

torch::Library* override_batch_norm(c10::DispatchKey key) {
  auto* const library = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  library->impl("batch_norm", &batch_norm);
  return library;
}

// Registers the kernel under the dispatch keys of autograd, and of the backends, which
// c10::InferenceMode dispatches to: batch_norm has no kernel of its own there.
void override_batch_norm() {
  using enum c10::DispatchKey;
  static const std::array libraries{override_batch_norm(AutogradCPU), override_batch_norm(CPU),
                                    override_batch_norm(AutogradCUDA), override_batch_norm(CUDA)};
  static_cast<void>(libraries);
}

// The tensor that identifies the calls of a BatchNorm, undefined if it has none; nothing for other
// modules.
Optional key_of(const torch::nn::Module& module) {
  Optional key;
  const auto look = [&](const auto* norm) {
    if (norm == nullptr) return;
    key = norm->options.track_running_stats() ? norm->running_mean : at::Tensor();
  };
  look(dynamic_cast<const torch::nn::BatchNorm1dImpl*>(&module));
  look(dynamic_cast<const torch::nn::BatchNorm2dImpl*>(&module));
  look(dynamic_cast<const torch::nn::BatchNorm3dImpl*>(&module));
  return key;
}

// A buffer "running_mean" reveals a BatchNorm that is not torch::nn's, such as one of TorchScript
// with its tensors registered in a module. It may not call batch_norm, since scripts are compiled.
void check_no_other(const std::string& name, const torch::nn::Module& module) {
  const auto is = [&]<typename... T>() {
    return (... || (dynamic_cast<const T*>(&module) != nullptr));
  };
  using torch::nn::InstanceNorm1dImpl, torch::nn::InstanceNorm2dImpl, torch::nn::InstanceNorm3dImpl;
  if (is.
      operator()<SyncBatchNormImpl, InstanceNorm1dImpl, InstanceNorm2dImpl, InstanceNorm3dImpl>()) {
    return;
  }
  for (const auto& buffer : module.named_buffers(false)) {
    if (!buffer.key().ends_with("running_mean")) continue;
    throw UsageError(fmt::format(
        "convert_sync_batchnorm: {} has a buffer {}, but is not a torch::nn::BatchNorm: "
        "TorchScript and other modules cannot be converted. Build that part from torch::nn "
        "modules, or from paceline::SyncBatchNorm, and load its tensors; or convert the other "
        "parts one by one",
        name.empty() ? "the module" : name, buffer.key()));
  }
}

}  // namespace

bool sync_batch_norm::is_in(const torch::nn::Module& module) {
  const auto parts = const_cast<torch::nn::Module&>(module).modules();
  return std::ranges::any_of(parts, [](const auto& part) {
    if (dynamic_cast<const SyncBatchNormImpl*>(part.get()) != nullptr) return true;
    const Optional key = key_of(*part);
    return key && key->defined() && Converted::instance().find(*key).has_value();
  });
}

void convert_sync_batchnorm(torch::nn::Module& module, const ProcessGroup& group) {
  std::vector<at::Tensor> keys;
  const auto visit = [&](const std::string& name, const torch::nn::Module& part) {
    const Optional key = key_of(part);
    if (!key) return check_no_other(name, part);
    if (!key->defined()) {
      throw UsageError(
          fmt::format("convert_sync_batchnorm: {} has no running statistics; declare it as a "
                      "paceline::SyncBatchNorm instead",
                      name.empty() ? "the module" : name));
    }
    keys.push_back(*key);
  };
  visit("", module);
  for (const auto& item : module.named_modules("", false)) visit(item.key(), *item.value());
  if (keys.empty()) return;
  override_batch_norm();
  for (const at::Tensor& key : keys) Converted::instance().add(key, group);
  base::log(LogLevel::debug, "convert_sync_batchnorm: {} modules", keys.size());
}

}  // namespace paceline
