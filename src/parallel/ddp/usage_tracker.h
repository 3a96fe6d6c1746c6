#pragma once

#include <optional>
#include <vector>

#include <paceline/ddp_options.h>

#include "parallel/ddp/bucketing.h"

namespace paceline::ddp {

// Tracks which parameters steps use: on this rank, and on any rank if the options require it.
class UsageTracker {
 public:
  using Flags = std::vector<bool>;  // by parameter

  UsageTracker(std::size_t parameters, const DdpOptions& options);

  // Whether a step may leave a parameter without a gradient.
  bool may_miss() const;
  // Whether the ranks must exchange which parameters they used.
  bool needs_exchange() const;

  // The parameter got a gradient.
  void note(std::size_t parameter) { used_locally_[parameter] = true; }
  // The parameters noted since the last synchronised step.
  const Flags& used_locally() const { return used_locally_; }
  void forget() { used_locally_.assign(used_locally_.size(), false); }
  // With skip_all_reduce_unused_params: by bucket, whether none of its parameters was noted. Else
  // empty.
  std::vector<bool> unused_buckets(const BucketPlan& plan) const;

  // Sets used(): `exchanged` if given, else the static graph's, else `fallback`.
  void set_used(const std::optional<Flags>& exchanged, const Flags& fallback);
  // Set by the last set_used.
  bool used(std::size_t parameter) const { return used_[parameter]; }
  const Flags& used() const { return used_; }
  // With a static graph, after its first step: whether any rank used the parameter in that step.
  bool is_ever_used(std::size_t parameter) const { return ever_used_[parameter]; }
  // Call when a step is finished.
  void end_step();

 private:
  bool static_graph_;
  bool find_unused_;
  bool skip_unused_;
  bool is_first_ = true;  // the first step has yet to be finished
  Flags used_locally_;
  Flags used_;
  Flags ever_used_;
};

}  // namespace paceline::ddp
