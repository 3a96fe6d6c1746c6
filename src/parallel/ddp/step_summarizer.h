#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include <paceline/ddp_options.h>

#include "parallel/ddp/model.h"
#include "shm/buckets/step_values.h"

namespace paceline::ddp {

// Summarizes what this rank has done to its model for a step. The ranks compare the summaries.
class StepSummarizer {
 public:
  // `parameters` must outlive this. `frozen`: the parameters that required no gradient when the
  // model was wrapped; they must stay so.
  StepSummarizer(const std::vector<NamedTensor>& parameters, std::vector<NamedTensor> frozen,
                 const DdpOptions& options);

  // Throws UsageError if one of `frozen` requires a gradient.
  void check_frozen() const;
  // How many leaves this rank has; what it does is counted for each.
  void set_leaves(int count);
  // A forward that a synchronised backward must follow. `leaf`: of this rank.
  void count_forward(int leaf) { ++count_of(leaf).forwards; }
  // A backward that leaves its gradients on this rank: of one leaf, or before all of them.
  void count_local_backward(int leaf) { ++count_of(leaf).local_backwards; }
  void count_local_backward();
  // Call when a leaf's synchronised backward begins: later forwards belong to the next step.
  void note_backward(int leaf) {
    Leaf& of = leaves_[static_cast<std::size_t>(leaf)];
    of.at_backward = of.counts;
  }
  // Call once local backwards no longer need to match: their gradients are reduced, zeroed, or
  // allowed to differ.
  void forget_local_backwards();
  // Call with logical ranks when all ranks have aborted `step`: ranks, and leaves, may have left it
  // after different numbers of forwards.
  void abort_leaves(std::uint32_t step);
  bool ran_local_backward(int leaf) const {
    return leaves_[static_cast<std::size_t>(leaf)].counts.local_backwards > 0;
  }
  // A leaf that has not done the same until its backward as the first leaf, or -1.
  int differing_leaf() const;

  shm::StepSummary summarize(bool joined);
  // The flags that belong to the last summary; valid until the next one.
  shm::FrozenFlags frozen_flags() const { return flags_; }

  // Notes that all ranks now have the same parameters, however often each has changed them.
  void note_same_parameters();
  // For ranks that may have changed their parameters differently: throws Mismatch if the values
  // differ. Collective.
  void compare_parameters(std::uint64_t step);

 private:
  // A tensor whose data may be replaced.
  struct Watched {
    at::Tensor tensor;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  };

  struct Counts {
    std::uint32_t forwards = 0;
    std::uint32_t local_backwards = 0;
  };
  struct Leaf {
    Counts counts;
    Counts at_backward{};  // when its synchronised backward began
  };

  Counts& count_of(int leaf) { return leaves_[static_cast<std::size_t>(leaf)].counts; }
  std::uint32_t count_modifications();

  const std::vector<NamedTensor>& parameters_;
  std::vector<NamedTensor> frozen_;
  ProcessGroup group_;
  bool compares_local_backwards_;
  std::vector<Watched> watched_;     // parameters and frozen ones
  std::vector<std::uint8_t> flags_;  // by parameter
  std::vector<Leaf> leaves_{1};
  std::uint32_t replacements_ = 0;     // how often a watched tensor's data was replaced
  std::uint32_t modifications_ = 0;    // at the last summary
  std::uint32_t loads_ = 0;            // at the last summary
  std::uint32_t same_parameters_ = 0;  // modifications_ when ranks had the same parameters
  std::uint32_t same_loads_ = 0;       // loads_ then
};

}  // namespace paceline::ddp
