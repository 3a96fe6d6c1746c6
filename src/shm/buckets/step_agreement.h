#pragma once

#include <span>
#include <vector>

#include "shm/buckets/control_blocks.h"

namespace paceline::shm {

// What the ranks said when they began a step, compared before anything is reduced: how much each
// counts in averages, and that their gradients belong together.
class StepAgreement {
 public:
  explicit StepAgreement(const ControlBlocks& blocks) : blocks_(blocks) {}

  void begin_step() { compared_ = false; }
  // To be called once every rank has published a bucket of the step. Throws Mismatch, which then is
  // the group's failure, if the ranks do not belong together.
  void compare_once() {
    if (!compared_) compare();
  }

  // In place of compare_once, where a job has several nodes: `job` has what the ranks of all nodes
  // said, `here` tells which of them are this node's. `global_ranks` is for messages.
  void set_from_job(std::span<const RankReport> job, std::span<const int> here,
                    const GlobalRanks& global_ranks);

  // By rank of this node, 1 over all ranks; empty if all ranks weigh the same.
  const std::vector<double>& weights() const { return weights_; }
  // What this rank counts, of 1 in all.
  double share() const;
  // Whether the ranks began the step with different numbers of modifications; the same on all.
  bool modifications_differ() const { return modifications_differ_; }

 private:
  void compare();
  void read_weights();
  void normalize(const GlobalRanks& global_ranks);

  const ControlBlocks& blocks_;
  bool compared_ = false;
  bool modifications_differ_ = false;
  std::vector<double> weights_;
  std::size_t ranks_ = 1;  // among which weights are divided
};

// Fails the group if different parameters are frozen. `flags` is by rank, empty for one that does
// not count.
void check_frozen(const ControlBlocks& blocks, std::span<const FrozenFlags> flags);

}  // namespace paceline::shm
