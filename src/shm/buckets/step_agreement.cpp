#include "shm/buckets/step_agreement.h"

#include <fmt/format.h>

#include <cmath>

namespace paceline::shm {

void StepAgreement::compare() {
  reached_ = true;
  read_weights();
  modified_apart_ = false;
  const StepSummary first = blocks_.summary_of(0);
  bool same = true;
  for (int rank = 1; rank < blocks_.size(); ++rank) {
    same = same && blocks_.summary_of(rank) == first;
  }
  if (same) return;
  std::vector<StepSummary> all;
  std::vector<FrozenFlags> flags;
  for (int rank = 0; rank < blocks_.size(); ++rank) {
    all.push_back(blocks_.summary_of(rank));
    flags.emplace_back(blocks_.frozen_flags(rank),
                       all.back().joined != 0 ? 0 : blocks_.parameters().size());
  }
  const Disagreement forwards = compare_forwards(all, blocks_.region().numbers());
  if (!forwards.ranks.empty()) {
    blocks_.fail(forwards.ranks, fmt::format("in {} {}", blocks_.position(), forwards.text));
  }
  if (differ_in_frozen(all)) check_frozen(blocks_, flags);
  modified_apart_ = differ_in_modifications(all);
}

void StepAgreement::read_weights() {
  weights_.clear();
  double total = 0;
  bool same = true;
  for (int rank = 0; rank < blocks_.size(); ++rank) {
    weights_.push_back(blocks_.progress(rank).weight.load(std::memory_order_relaxed));
    same = same && weights_.back() == weights_.front();
    total += weights_.back();
  }
  if (!(total > 0) || !std::isfinite(total)) {
    blocks_.fail(RankSet::all(blocks_.size()),
                 fmt::format("in {} the ranks' weights add up to {}: there is nothing to average",
                             blocks_.position(), total));
  }
  if (same) weights_.clear();
  for (double& weight : weights_) weight /= total;
}

double StepAgreement::share() const {
  return weights_.empty() ? 1.0 / blocks_.size()
                          : weights_[static_cast<std::size_t>(blocks_.rank())];
}

void check_frozen(const ControlBlocks& blocks, std::span<const FrozenFlags> flags) {
  const Disagreement frozen = compare_frozen(flags, blocks.parameters(), blocks.region().numbers());
  if (frozen.ranks.empty()) return;
  blocks.fail(frozen.ranks, fmt::format("in {} {}", blocks.position(), frozen.text));
}

}  // namespace paceline::shm
