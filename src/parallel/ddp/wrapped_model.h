#pragma once

#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <paceline/ddp_options.h>
#include <paceline/named_tensors.h>

#include "parallel/ddp/model.h"

namespace paceline::ddp {

// What DistributedDataParallel wraps: a module, one of TorchScript, or tensors that a program has
// named.
class WrappedModel {
 public:
  // It must outlive this.
  explicit WrappedModel(torch::nn::Module& module) : module_(&module) {}
  explicit WrappedModel(const torch::jit::Module& script) : script_(script) {}
  // Throws UsageError for an undefined tensor, or if two tensors have one name.
  WrappedModel(const NamedTensors& parameters, const NamedTensors& buffers);
  // The same, for a program that knows which gradients are sparse.
  WrappedModel(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& buffers);

  // All tensors that exist now. A torch::nn::Module's may be undefined.
  std::vector<NamedTensor> parameters() const;
  std::vector<NamedTensor> buffers() const;
  // The parameters that take gradients; each tensor once, under its first name.
  std::vector<NamedTensor> trainable_parameters() const;
  // The parameters that are frozen now.
  std::vector<NamedTensor> frozen_parameters() const;

  // Without a module, every forward with grad mode on is one in training mode.
  bool is_training() const;
  bool has_sync_batch_norm() const;

 private:
  torch::nn::Module* module_ = nullptr;
  std::optional<torch::jit::Module> script_;
  std::vector<NamedTensor> parameters_;  // without either, as is the next
  std::vector<NamedTensor> buffers_;
};

// A line for each parameter and buffer: its name, shape, strides, type and whether it takes
// gradients.
std::vector<std::string> describe(const WrappedModel& model);
std::vector<std::string> split_lines(const std::string& text);
// Names the first line that differs, of the models of two ranks.
std::string first_difference(std::span<const std::string> first, std::span<const std::string> other,
                             std::pair<int, int> ranks);
// "logical_ranks = 2 on rank 0 and logical_ranks = 4 on rank 1: it must be ..."
std::string option_difference(const std::string& first, const std::string& other,
                              std::pair<int, int> ranks);

// Of a model in timelines.
struct Recording {
  std::uint64_t number = 0;
  // What reductions cost: if a rank has a timeline, and its model on the CPU.
  bool measures = false;
  int rank = -1;                 // as which this process records; -1: it does not
  std::vector<int> ranks{};      // of all processes of the group, ascending; empty if not known
  std::uint64_t process = 0;     // a number that no other process has
  std::uint64_t first_rank = 0;  // that of the process which records as the lowest of these ranks
};

// Throws Mismatch, the same on every rank, if the ranks' parameters and buffers differ in number,
// name, shape, strides, type or whether they take gradients, or if options differ that ranks must
// give alike. Collective. Returns the highest number that a rank has, as a process that took a lost
// one's place has wrapped fewer models, whether any rank measures, and what the ranks say of
// themselves.
Recording check_same_model(const WrappedModel& model, const DdpOptions& options,
                           const Recording& recording);

}  // namespace paceline::ddp
