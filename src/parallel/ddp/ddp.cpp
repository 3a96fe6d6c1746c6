#include <paceline/ddp.h>

#include <utility>

#include <paceline/error.h>

#include "parallel/ddp/ddp_core.h"

namespace paceline::detail {
namespace {

torch::OrderedDict<std::string, at::Tensor> by_name(const std::vector<ddp::NamedTensor>& tensors) {
  torch::OrderedDict<std::string, at::Tensor> all;
  for (const auto& one : tensors) all.insert(one.name, one.tensor);
  return all;
}

}  // namespace

DdpHandle::DdpHandle(torch::nn::Module& module, const DdpOptions& options)
    : core_(std::make_unique<DdpCore>(ddp::WrappedModel(module), options)) {}
DdpHandle::DdpHandle(const torch::jit::Module& module, const DdpOptions& options)
    : core_(std::make_unique<DdpCore>(ddp::WrappedModel(module), options)) {}
DdpHandle::DdpHandle(const NamedTensors& parameters, const NamedTensors& buffers,
                     const DdpOptions& options)
    : core_(std::make_unique<DdpCore>(ddp::WrappedModel(parameters, buffers), options)) {}
DdpHandle::DdpHandle(DdpHandle&&) noexcept = default;
DdpHandle& DdpHandle::operator=(DdpHandle&&) noexcept = default;
DdpHandle::~DdpHandle() = default;

DdpCore& DdpHandle::core() const {
  if (core_) return *core_;
  throw UsageError(
      "a DistributedDataParallel that was moved from may only be destroyed or assigned to");
}

void DdpHandle::before_forward() {
  core().before_forward();
}
void DdpHandle::after_forward() {
  core().after_forward();
}
const DdpStats& DdpHandle::stats() const {
  return core().stats();
}
std::optional<at::Device> DdpHandle::input_device() const {
  return core().input_device();
}
bool DdpHandle::watches_outputs() const {
  return core().watches_outputs();
}
void DdpHandle::watch_output(const at::Tensor& output) {
  core().watch_output(output);
}
std::shared_ptr<int> DdpHandle::no_sync_guards() const {
  return core().no_sync_guards();
}
at::Tensor DdpHandle::average_loss(const at::Tensor& loss) const {
  return core().average_loss(loss);
}
void DdpHandle::set_samples(double count) {
  core().set_samples(count);
}
void DdpHandle::register_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook) {
  core().register_comm_hook(std::move(hook));
}
const std::shared_ptr<LogicalRanksCore>& DdpHandle::logical_ranks() const {
  return core().logical_ranks();
}
Joinable& DdpHandle::joinable() const {
  return core();
}
torch::OrderedDict<std::string, at::Tensor> DdpHandle::named_parameters() const {
  return by_name(core().model().parameters());
}
torch::OrderedDict<std::string, at::Tensor> DdpHandle::named_buffers() const {
  return by_name(core().model().buffers());
}
void DdpHandle::zero_grad(bool set_to_none) {
  for (const auto& one : core().model().parameters()) {
    if (!one.tensor.defined() || !one.tensor.grad().defined()) continue;
    if (set_to_none) {
      one.tensor.mutable_grad().reset();
    } else {
      one.tensor.grad().detach_().zero_();
    }
  }
}
bool DdpHandle::is_training() const {
  return core().model().is_training();
}

}  // namespace paceline::detail
