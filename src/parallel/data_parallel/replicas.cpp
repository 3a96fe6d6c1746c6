#include "parallel/data_parallel/replicas.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/variable.h>

#include <bit>
#include <unordered_set>
#include <utility>

#include <paceline/error.h>

namespace paceline::data_parallel {
namespace {

bool share_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.is_alias_of(b) && a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() &&
         a.strides() == b.strides() && a.scalar_type() == b.scalar_type();
}

// In-place changes of either count for both, so that autograd notices those between a forward and
// its backward.
void share_version(const at::Tensor& replica, const at::Tensor& original) {
  using namespace torch::autograd::impl;
  set_version_counter(replica, version_counter(original));
}

// What a replica has under the name of the module's tensor.
at::Tensor counterpart(const torch::OrderedDict<std::string, at::Tensor>& tensors,
                       const std::string& name, const at::Tensor& original, std::size_t replica) {
  const at::Tensor* const found = tensors.find(name);
  if (found != nullptr && found->sizes() == original.sizes()) return *found;
  throw UsageError(fmt::format(
      "DataParallel: {} has the shape {} in the module, and {} in replica {}: clone(), or the "
      "function that makes modules, must return equal ones",
      name, fmt::streamed(original.sizes()),
      found == nullptr ? "does not exist" : fmt::to_string(fmt::streamed(found->sizes())),
      replica));
}

void check_same_number(const char* what, std::size_t module, std::size_t number,
                       std::size_t replica) {
  if (module == number) return;
  throw UsageError(
      fmt::format("DataParallel: the module has {} {} and replica {} has {}: clone(), or the "
                  "function that makes modules, must return equal ones",
                  module, what, replica, number));
}

// Not a change for autograd: an earlier forward may have saved the copy for a backward that is
// still to come.
void copy_value(const at::Tensor& copy, const at::Tensor& original) {
  if (copy.sizes() == original.sizes() && copy.scalar_type() == original.scalar_type()) {
    const at::AutoDispatchBelowADInplaceOrView untracked;
    copy.copy_(original);
  } else {
    copy.set_data(original.detach().to(copy.device(), original.scalar_type(), false, true));
  }
}

}  // namespace

Replicas::Replicas(std::shared_ptr<torch::nn::Module> module, Modules replicas,
                   std::vector<at::Device> devices)
    : module_(std::move(module)),
      replicas_(std::move(replicas)),
      devices_(std::move(devices)),
      submodules_(module_->modules()) {
  Index index;
  for (const auto& one : module_->named_parameters()) {
    if (!index.emplace(one.value().unsafeGetTensorImpl(), parameters_.size()).second) continue;
    parameters_.push_back({one.key(), one.value(), {}});
    parameters_.back().leaves.resize(replicas_.size());
  }
  for (const auto& one : module_->named_buffers()) {
    buffers_.push_back({one.key(), one.value(), {}});
  }
  for (std::size_t i = 0; i < replicas_.size(); ++i) {
    replica_submodules_.push_back(replicas_[i]->modules());
    check_same_number("submodules", submodules_.size(), replica_submodules_[i].size(), i);
    match_parameters(i, index);
    match_buffers(i);
  }
  before_forward(replicas_.size());
}

void Replicas::match_parameters(std::size_t replica, const Index& index) {
  const auto originals = module_->named_parameters();
  const auto leaves = replicas_[replica]->named_parameters();
  check_same_number("parameters", originals.size(), leaves.size(), replica);
  Index found;
  for (const auto& one : originals) {
    const at::Tensor leaf = counterpart(leaves, one.key(), one.value(), replica);
    if (leaf.is_same(one.value())) {
      throw UsageError(fmt::format(
          "DataParallel: replica {} has the module's own {}: the function that makes modules must "
          "make a new one in each call",
          replica, one.key()));
    }
    const std::size_t number = index.at(one.value().unsafeGetTensorImpl());
    const auto [before, is_new] = found.emplace(leaf.unsafeGetTensorImpl(), number);
    if (before->second != number) {
      throw UsageError(fmt::format(
          "DataParallel: {} is a parameter of its own in the module, and shares another one's "
          "tensor in replica {}: clone(), or the function that makes modules, must return equal "
          "ones",
          one.key(), replica));
    }
    if (!is_new) continue;
    if (shares_memory(replica)) share_version(leaf, one.value());
    parameters_[number].leaves[replica].push_back(leaf);
  }
}

void Replicas::match_buffers(std::size_t replica) {
  const auto copies = replicas_[replica]->named_buffers();
  check_same_number("buffers", buffers_.size(), copies.size(), replica);
  for (Buffer& buffer : buffers_) {
    buffer.copies.push_back(counterpart(copies, buffer.name, buffer.original, replica));
    if (replica == 0) share_version(buffer.copies[0], buffer.original);
  }
}

void Replicas::before_forward(std::size_t count) {
  const c10::InferenceMode normal(false);
  const c10::NoGradGuard no_grad;
  if (std::has_single_bit(++forwards_)) check_parameters();
  for (const auto& parameter : parameters_) check_device(parameter.name, parameter.original);
  for (const auto& buffer : buffers_) check_device(buffer.name, buffer.original);
  for (std::size_t i = 0; i < count; ++i) {
    follow_modes(i);
    for (const auto& parameter : parameters_) follow_parameter(parameter, i);
    for (const auto& buffer : buffers_) follow_buffer(buffer, i);
  }
}

// Takes microseconds, so that not every forward calls it.
void Replicas::check_parameters() const {
  const auto fail = [](const char* what, const std::string& name) {
    throw UsageError(
        fmt::format("DataParallel: the module has {} parameter {} since the replicas were made: "
                    "change the module first, then make a DataParallel of it",
                    what, name));
  };
  std::unordered_set<const c10::TensorImpl*> left;
  for (const auto& parameter : parameters_) left.insert(parameter.original.unsafeGetTensorImpl());
  const auto known = left;
  for (const auto& one : module_->named_parameters()) {
    if (!known.contains(one.value().unsafeGetTensorImpl())) fail("got", one.key());
    left.erase(one.value().unsafeGetTensorImpl());
  }
  for (const auto& parameter : parameters_) {
    if (left.contains(parameter.original.unsafeGetTensorImpl())) fail("lost", parameter.name);
  }
}

void Replicas::check_device(const std::string& name, const at::Tensor& original) const {
  if (original.device() == devices_[0]) return;
  throw UsageError(fmt::format(
      "DataParallel: {} is on {}, and replica 0 on {}: the whole module must be on one device, and "
      "stay there while a DataParallel of it exists",
      name, original.device().str(), devices_[0].str()));
}

// Modules come before their submodules, whose modes train() sets too.
void Replicas::follow_modes(std::size_t replica) {
  for (std::size_t i = 0; i < submodules_.size(); ++i) {
    const bool training = submodules_[i]->is_training();
    torch::nn::Module& copy = *replica_submodules_[replica][i];
    if (copy.is_training() != training) copy.train(training);
  }
}

void Replicas::follow_parameter(const SharedParameter& parameter, std::size_t replica) const {
  const at::Tensor& original = parameter.original;
  for (const at::Tensor& leaf : parameter.leaves[replica]) {
    if (!shares_memory(replica)) {
      copy_value(leaf, original);
    } else if (!share_memory(leaf, original)) {
      leaf.set_data(original.detach());
    }
    if (leaf.requires_grad() != original.requires_grad()) {
      leaf.set_requires_grad(original.requires_grad());
    }
  }
}

void Replicas::follow_buffer(const Buffer& buffer, std::size_t replica) const {
  const at::Tensor& copy = buffer.copies[replica];
  if (replica > 0) {
    copy_value(copy, buffer.original);
  } else if (!share_memory(copy, buffer.original)) {
    copy.set_data(buffer.original.detach());
  }
}

void Replicas::after_forward(std::size_t count) {
  const c10::InferenceMode normal(false);
  for (const auto& [name, original, copies] : buffers_) {
    if (!share_memory(copies[0], original)) original.set_data(copies[0].detach());
  }
  std::string found;
  for (const auto& parameter : parameters_) {
    for (std::size_t i = 0; i < count; ++i) {
      for (const at::Tensor& leaf : parameter.leaves[i]) {
        if (!leaf.grad().defined()) continue;
        leaf.mutable_grad().reset();
        found = parameter.name;
      }
    }
  }
  if (found.empty()) return;
  throw UsageError(
      fmt::format("DataParallel: a replica has run a backward, which gave its copy of {} a "
                  "gradient: return the loss, and run backward on the result",
                  found));
}

}  // namespace paceline::data_parallel
