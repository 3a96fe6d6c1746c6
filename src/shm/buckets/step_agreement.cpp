#include "shm/buckets/step_agreement.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace paceline::shm {

void StepAgreement::compare() {
  compared_ = true;
  read_weights();
  modifications_differ_ = false;
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
  const Disagreement forwards = compare_forwards(all, blocks_.region().global_ranks());
  if (!forwards.ranks.empty()) {
    blocks_.fail(forwards.ranks, fmt::format("in {} {}", blocks_.position(), forwards.text));
  }
  if (differ_in_frozen(all)) check_frozen(blocks_, flags);
  modifications_differ_ = differ_in_modifications(all);
}

void StepAgreement::read_weights() {
  weights_.clear();
  weights_.resize(static_cast<std::size_t>(blocks_.leaves().leaves()));
  for (int rank = 0; rank < blocks_.size(); ++rank) {
    const LeafRange range = blocks_.leaves().range(rank);
    const auto first = static_cast<std::size_t>(range.first);
    for (int leaf = 0; leaf < range.count; ++leaf) {
      weights_[first + static_cast<std::size_t>(leaf)] = blocks_.weight_of(rank, leaf);
    }
  }
  add_up_weights(blocks_.region().global_ranks(), blocks_.size());
}

void StepAgreement::set_from_job(std::span<const RankReport> job, std::span<const int> here,
                                 const GlobalRanks& global_ranks) {
  std::vector<StepSummary> summaries;
  weights_.clear();
  for (const RankReport& report : job) {
    summaries.push_back(report.summary);
    weights_.push_back(report.weight);
  }
  modifications_differ_ = differ_in_modifications(summaries);
  add_up_weights(global_ranks, static_cast<int>(job.size()));
  if (weights_.empty()) return;
  std::vector<double> of_node;
  for (const int rank : here) of_node.push_back(weights_[static_cast<std::size_t>(rank)]);
  weights_ = std::move(of_node);
}

// Call with the weights of all leaves in `weights_`.
void StepAgreement::add_up_weights(const GlobalRanks& global_ranks, int ranks) {
  divisor_ = 0;
  for (const double weight : weights_) divisor_ += weight;
  if (!(divisor_ > 0) || !std::isfinite(divisor_)) {
    blocks_.fail({FailureKind::mismatch, global_ranks.of(RankSet::all(ranks)),
                  fmt::format("in {} the ranks' weights add up to {}: there is nothing to average",
                              blocks_.position(), divisor_)});
  }
  if (sums_) divisor_ = 1;
  // Then multiplying by them changes nothing.
  if (std::ranges::all_of(weights_, [](double weight) { return weight == 1; })) weights_.clear();
}

double StepAgreement::share() const {
  return blocks_.leaves().weight_of(blocks_.rank(), weights_) / divisor_;
}

void check_frozen(const ControlBlocks& blocks, std::span<const FrozenFlags> flags) {
  const Disagreement frozen =
      compare_frozen(flags, blocks.parameters(), blocks.region().global_ranks());
  if (frozen.ranks.empty()) return;
  blocks.fail(frozen.ranks, fmt::format("in {} {}", blocks.position(), frozen.text));
}

}  // namespace paceline::shm
