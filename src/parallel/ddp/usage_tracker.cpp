#include "parallel/ddp/usage_tracker.h"

#include <algorithm>

namespace paceline::ddp {

UsageTracker::UsageTracker(std::size_t parameters, const DdpOptions& options)
    : static_graph_(options.static_graph),
      find_unused_(options.find_unused_parameters),
      skip_unused_(options.skip_all_reduce_unused_params),
      used_locally_(parameters),
      used_(parameters),
      ever_used_(parameters) {}

bool UsageTracker::may_miss() const {
  return static_graph_ ? is_first_ : find_unused_;
}

bool UsageTracker::needs_exchange() const {
  return static_graph_ ? is_first_ : find_unused_ && !skip_unused_;
}

std::vector<bool> UsageTracker::unused_buckets(const BucketPlan& plan) const {
  std::vector<bool> unused;
  if (!skip_unused_) return unused;
  for (const auto& bucket : plan.buckets) {
    unused.push_back(
        std::ranges::none_of(bucket.parameters, [&](std::size_t i) { return used_locally_[i]; }));
  }
  return unused;
}

void UsageTracker::set_used(const std::optional<Flags>& exchanged, const Flags& fallback) {
  if (exchanged) {
    used_ = *exchanged;
  } else {
    used_ = static_graph_ ? ever_used_ : fallback;
  }
}

void UsageTracker::end_step() {
  forget();
  if (is_first_) ever_used_ = used_;
  is_first_ = false;
}

}  // namespace paceline::ddp
