#pragma once

#include <span>
#include <vector>

#include "shm/buckets/control_blocks.h"

namespace paceline::shm {

// Compares the values that the ranks published when they began a step, before anything is reduced:
// their gradients must belong together. Also has the ranks' weights in averages.
class StepAgreement {
 public:
  // `sums`: whether averages are not divided.
  StepAgreement(const ControlBlocks& blocks, bool sums) : blocks_(blocks), sums_(sums) {}

  void begin_step() { compared_ = false; }
  // Call once every rank has published a bucket of the step. If the ranks' gradients do not belong
  // together, fails the group with Mismatch.
  void compare_once() {
    if (!compared_) compare();
  }

  // Instead of compare_once, if the job has several nodes. Sets the agreement from `job`, the
  // reports of all nodes' ranks, which agree. `here`: the indices of this node's ranks in it.
  // `global_ranks` appears in messages.
  void set_from_job(std::span<const RankReport> job, std::span<const int> here,
                    const GlobalRanks& global_ranks);

  // The weights of this node's leaves; with several nodes, those of its ranks. Empty if all of the
  // job are 1.
  const std::vector<double>& weights() const { return weights_; }
  // The sum of all leaves' weights, by which averages are divided; or 1.
  double divisor() const { return divisor_; }
  // This rank's part of the averages.
  double share() const;
  // Whether the ranks began the step with different numbers of modifications; the same on all.
  bool modifications_differ() const { return modifications_differ_; }

 private:
  void compare();
  void read_weights();
  void add_up_weights(const GlobalRanks& global_ranks, int ranks);

  const ControlBlocks& blocks_;
  bool sums_;
  bool compared_ = false;
  bool modifications_differ_ = false;
  std::vector<double> weights_;
  double divisor_ = 1;
};

// Fails the group if different parameters are frozen. `flags` is by rank, empty for a rank that is
// not compared.
void check_frozen(const ControlBlocks& blocks, std::span<const FrozenFlags> flags);

}  // namespace paceline::shm
