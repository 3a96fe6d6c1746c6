#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <paceline/distributed.h>

#include "shm/buckets/step_summary.h"

namespace paceline::distributed {

// Compares what the ranks of a c10d::Backend did for a step.
class SummaryComparison {
 public:
  // `device`: where the backend takes tensors. `parameters`: the names of those in FrozenFlags.
  SummaryComparison(ProcessGroup group, c10::intrusive_ptr<c10d::Backend> backend,
                    at::Device device, std::vector<std::string> parameters);

  // `all`: by rank, the same on every rank. Throws Mismatch, the same on every rank, if their
  // gradients do not belong together. `frozen`: this rank's flags. Collective if the ranks have
  // frozen different parameters.
  void compare(std::span<const shm::StepSummary> all, shm::FrozenFlags frozen, std::uint32_t step);
  // Whether the summaries compared last differ in the number of modifications.
  bool modifications_differ() const { return modifications_differ_; }

 private:
  shm::Disagreement compare_frozen(std::span<const shm::StepSummary> all, shm::FrozenFlags frozen,
                                   const shm::GlobalRanks& global_ranks) const;

  ProcessGroup group_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  at::Device device_;
  std::vector<std::string> parameters_;
  bool modifications_differ_ = false;
};

}  // namespace paceline::distributed
