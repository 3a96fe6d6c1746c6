#pragma once

#include <optional>
#include <vector>

#include <paceline/ddp_options.h>

#include "parallel/ddp/model.h"

namespace paceline::ddp {

// The parameters of delay_all_reduce_named_params, whose gradients are reduced with the trigger's.
class DelayedParameters {
 public:
  DelayedParameters(const std::vector<NamedTensor>& parameters, const DdpOptions& options);

  // The parameters to reduce once `parameter`'s gradient is ready; empty unless it is the trigger.
  const Indices& triggered_by(std::size_t parameter) const;
  std::optional<std::size_t> trigger() const { return trigger_; }
  bool contains(std::size_t parameter) const { return is_delayed_[parameter]; }
  const std::vector<bool>& flags() const { return is_delayed_; }

 private:
  std::optional<std::size_t> trigger_;
  std::vector<bool> is_delayed_;  // by parameter
  Indices delayed_;
};

}  // namespace paceline::ddp
