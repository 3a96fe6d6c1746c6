#include <paceline/ddp.h>

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <paceline/error.h>

#include "parallel/ddp/model.h"
#include "parallel/ddp/reducer.h"

namespace paceline::detail {

class DdpCore {
 public:
  DdpCore(torch::nn::Module& module, const DdpOptions& options)
      : module_(module), options_(options), sync_(std::make_shared<bool>(true)) {
    if (!(options.bucket_cap_mb > 0)) {
      throw UsageError(
          fmt::format("bucket_cap_mb of {}: it must be positive", options.bucket_cap_mb));
    }
    const auto parameters = ddp::trainable_parameters(module);
    if (parameters.empty()) {
      throw UsageError(
          "DistributedDataParallel needs a module with a parameter that requires a "
          "gradient");
    }
    if (get_world_size(options.process_group) == 1) return;
    // The world of now, also when there is another one later.
    options_.process_group = ProcessGroup(options.process_group.c10d());
    ddp::check_same_model(module, options_.process_group);
    buffers_ = module.buffers();
    auto tensors = module.parameters();
    tensors.insert(tensors.end(), buffers_.begin(), buffers_.end());
    ddp::broadcast_from_first(tensors, options_.process_group);
    reducer_ = std::make_unique<ddp::Reducer>(parameters, options_);
  }

  void before_forward() {
    if (!reducer_ || !at::GradMode::is_enabled()) return;
    const bool training = module_.is_training();
    reducer_->before_forward(*sync_, training);
    if (!training) return;
    if (options_.broadcast_buffers && buffers_may_differ_ && !buffers_.empty()) {
      ddp::broadcast_from_first(buffers_, options_.process_group);
    }
    buffers_may_differ_ = *sync_;
  }

  const std::shared_ptr<bool>& sync_switch() const { return sync_; }

 private:
  torch::nn::Module& module_;
  DdpOptions options_;
  std::shared_ptr<bool> sync_;
  std::unique_ptr<ddp::Reducer> reducer_;  // none in a world of one
  std::vector<at::Tensor> buffers_;
  bool buffers_may_differ_ = false;  // the last training forward was synchronised
};

DdpHandle::DdpHandle(torch::nn::Module* module, const DdpOptions& options) {
  if (module == nullptr) throw UsageError("DistributedDataParallel of a null module");
  core_ = std::make_unique<DdpCore>(*module, options);
}
DdpHandle::DdpHandle(DdpHandle&&) noexcept = default;
DdpHandle& DdpHandle::operator=(DdpHandle&&) noexcept = default;
DdpHandle::~DdpHandle() = default;

void DdpHandle::before_forward() {
  core_->before_forward();
}
std::shared_ptr<bool> DdpHandle::sync_switch() const {
  return core_->sync_switch();
}

}  // namespace paceline::detail
