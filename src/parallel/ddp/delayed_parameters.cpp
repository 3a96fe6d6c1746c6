#include "parallel/ddp/delayed_parameters.h"

#include <algorithm>

namespace paceline::ddp {

DelayedParameters::DelayedParameters(const std::vector<NamedTensor>& parameters,
                                     const DdpOptions& options) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const std::string& name = parameters[i].name;
    if (name == options.param_to_hook_all_reduce) trigger_ = i;
    is_delayed_.push_back(std::ranges::count(options.delay_all_reduce_named_params, name) > 0);
    if (is_delayed_[i]) delayed_.push_back(i);
  }
}

const Indices& DelayedParameters::triggered_by(std::size_t parameter) const {
  static const Indices nothing;
  return trigger_ == parameter ? delayed_ : nothing;
}

}  // namespace paceline::ddp
