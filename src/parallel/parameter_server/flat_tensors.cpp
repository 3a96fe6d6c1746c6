#include "parallel/parameter_server/flat_tensors.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <set>

#include <paceline/error.h>

namespace paceline::parameter_server {
namespace {

constexpr std::size_t kTensorAlignment = 64;

std::size_t aligned(std::size_t bytes) {
  return (bytes + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
}

}  // namespace

std::vector<ddp::NamedTensor> distinct_tensors(const std::vector<ddp::NamedTensor>& tensors,
                                               const char* user) {
  std::vector<ddp::NamedTensor> distinct;
  std::set<const void*> seen;
  for (const auto& [name, tensor, sparse] : tensors) {
    if (!tensor.defined() || !seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided) {
      throw UsageError(fmt::format("{}: {} is a {} tensor on {}; it needs dense tensors on the CPU",
                                   user, name, c10::str(tensor.layout()), tensor.device().str()));
    }
    distinct.push_back({name, tensor, sparse});
  }
  return distinct;
}

FlatTensors::FlatTensors(const Tensors& like,
                         const std::function<at::Tensor(std::size_t)>& allocate) {
  std::size_t bytes = 0;
  for (const at::Tensor& tensor : like) bytes += aligned(tensor.nbytes());
  memory_ = allocate(bytes + like.size());
  auto* data = static_cast<std::byte*>(memory_.data_ptr());
  const auto keep = [memory = memory_](void*) {};
  for (const at::Tensor& tensor : like) {
    views_.push_back(
        at::from_blob(data, tensor.sizes(), keep, at::TensorOptions(tensor.scalar_type())));
    data += aligned(tensor.nbytes());
  }
  present_ =
      memory_.narrow(0, static_cast<std::int64_t>(bytes), static_cast<std::int64_t>(like.size()));
}

void FlatTensors::write(const Tensors& tensors) {
  const at::NoGradGuard no_grad;
  auto* const present = present_.data_ptr<std::uint8_t>();
  for (std::size_t i = 0; i < views_.size(); ++i) {
    present[i] = tensors[i].defined() ? 1 : 0;
    if (tensors[i].defined()) views_[i].copy_(tensors[i]);
  }
}

void FlatTensors::read(const Tensors& tensors) const {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < views_.size(); ++i) tensors[i].copy_(views_[i]);
}

at::Tensor FlatTensors::at(std::size_t index) const {
  return present_.data_ptr<std::uint8_t>()[index] != 0 ? views_[index] : at::Tensor();
}

}  // namespace paceline::parameter_server
