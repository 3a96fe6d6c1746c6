#include "parallel/ddp/step_summarizer.h"

#include <fmt/format.h>

#include <algorithm>

#include <paceline/error.h>

#include "parallel/ddp/model_loads.h"
#include "parallel/with_error_context.h"

namespace paceline::ddp {
namespace {

// Far from what ranks count between two comparisons.
constexpr std::uint32_t kMayDiffer = 1U << 31;

}  // namespace

StepSummarizer::StepSummarizer(const std::vector<NamedTensor>& parameters,
                               std::vector<NamedTensor> frozen, const DdpOptions& options)
    : parameters_(parameters),
      frozen_(std::move(frozen)),
      group_(options.process_group),
      compares_local_backwards_(options.average != Average::samples),
      flags_(parameters.size()) {
  const auto watch = [&](const NamedTensor& one) {
    const auto& data = one.tensor.unsafeGetTensorImpl()->unsafe_storage();
    watched_.push_back({one.tensor, data.getWeakStorageImpl()});
  };
  std::ranges::for_each(parameters_, watch);
  std::ranges::for_each(frozen_, watch);
  note_same_parameters();
}

// Parameters frozen when the model was wrapped have no hook.
void StepSummarizer::check_frozen() const {
  for (const NamedTensor& one : frozen_) {
    if (!one.tensor.requires_grad()) continue;
    throw UsageError(fmt::format(
        "parameter {} requires a gradient now, but did not when it was wrapped, so its gradient "
        "would not be averaged: wrap the module again, or freeze parameters only after wrapping it",
        one.name));
  }
}

void StepSummarizer::set_leaves(int count) {
  const Leaf first = leaves_[0];
  leaves_.assign(static_cast<std::size_t>(count), first);
}

void StepSummarizer::count_local_backward() {
  for (Leaf& leaf : leaves_) ++leaf.counts.local_backwards;
}

void StepSummarizer::forget_local_backwards() {
  for (Leaf& leaf : leaves_) leaf.counts.local_backwards = 0;
}

void StepSummarizer::abort_leaves(std::uint32_t step) {
  std::ranges::fill(leaves_, Leaf{.counts = {.forwards = step}});
}

int StepSummarizer::differing_leaf() const {
  const Counts& first = leaves_[0].at_backward;
  const auto differs = [&](const Leaf& leaf) {
    const auto& [forwards, local_backwards] = leaf.at_backward;
    return forwards != first.forwards ||
           (compares_local_backwards_ && local_backwards != first.local_backwards);
  };
  const auto found = std::ranges::find_if(leaves_, differs);
  return found == leaves_.end() ? -1 : static_cast<int>(found - leaves_.begin());
}

shm::StepSummary StepSummarizer::summarize(bool joined) {
  bool any_frozen = false;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    flags_[i] = parameters_[i].tensor.requires_grad() ? 0 : 1;
    any_frozen = any_frozen || flags_[i] != 0;
  }
  modifications_ = count_modifications();
  loads_ = model_loads();
  const auto& [forwards, local_backwards] = leaves_[0].at_backward;
  // Ranks that have all loaded a model may have loaded different ones: their counts must differ.
  const bool may_differ = loads_ != same_loads_ && get_rank(group_) > 0;
  return {.forwards = forwards,
          .local_backwards = compares_local_backwards_ ? local_backwards : 0,
          .frozen = any_frozen ? shm::fingerprint(flags_) : 0,
          .modifications = modifications_ - same_parameters_ + (may_differ ? kMayDiffer : 0),
          .joined = joined ? 1U : 0U};
}

void StepSummarizer::note_same_parameters() {
  same_parameters_ = count_modifications();
  same_loads_ = model_loads();
}

// Counts in-place writes and replacements of data of all parameters.
std::uint32_t StepSummarizer::count_modifications() {
  std::uint32_t writes = 0;
  for (Watched& one : watched_) {
    const auto& data = one.tensor.unsafeGetTensorImpl()->unsafe_storage();
    if (data.unsafeGetStorageImpl() != one.storage._unsafe_get_target()) {
      one.storage = data.getWeakStorageImpl();
      ++replacements_;
    }
    if (!one.tensor.is_inference()) writes += static_cast<std::uint32_t>(one.tensor._version());
  }
  return writes + replacements_;
}

// One rank may have exchanged its parameters for an evaluation, and put them back.
void StepSummarizer::compare_parameters(std::uint64_t step) {
  std::vector<NamedTensor> all = frozen_;
  all.insert(all.end(), parameters_.begin(), parameters_.end());
  parallel::with_error_context(
      "comparing parameters, which the ranks have loaded, or changed a different number of times: "
      "load the same model on every rank, or before it is wrapped; let a closure return the loss "
      "averaged over "
      "the ranks",
      [&] { check_same_values(all, group_, step); });
  same_parameters_ = modifications_;
  same_loads_ = loads_;
}

}  // namespace paceline::ddp
