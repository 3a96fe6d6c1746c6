#pragma once

#include <torch/nn/module.h>

#include <string>
#include <vector>

#include <paceline/ddp.h>

#include "parallel/ddp/model.h"

namespace paceline::ddp {

// What DistributedDataParallel wraps: a module, or tensors that a program has named.
class WrappedModel {
 public:
  // It must outlive this.
  explicit WrappedModel(torch::nn::Module& module) : module_(&module) {}
  // Throws UsageError for an undefined tensor, or if two tensors have one name.
  WrappedModel(const NamedTensors& parameters, const NamedTensors& buffers);
  // The same, for a program that knows which gradients are sparse.
  WrappedModel(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& buffers);

  // All tensors that exist now. A module's may be undefined.
  std::vector<NamedTensor> parameters() const;
  std::vector<NamedTensor> buffers() const;
  // The parameters that take gradients; each tensor once, under its first name.
  std::vector<NamedTensor> trainable_parameters() const;
  // The parameters that are frozen now.
  std::vector<NamedTensor> frozen_parameters() const;

  // Without a module, every forward with grad mode on is one in training mode.
  bool is_training() const { return module_ == nullptr || module_->is_training(); }
  bool has_sync_batch_norm() const;

 private:
  torch::nn::Module* module_ = nullptr;
  std::vector<NamedTensor> parameters_;  // without a module, as is the next
  std::vector<NamedTensor> buffers_;
};

// Throws Mismatch, the same on every rank, if the ranks' parameters and buffers differ in number,
// name, shape, strides, type or whether they take gradients, or if `logical_ranks` differs.
// Collective.
void check_same_model(const WrappedModel& model, int logical_ranks, const ProcessGroup& group);

}  // namespace paceline::ddp
