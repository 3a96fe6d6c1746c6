#pragma once

#include <vector>

#include "parallel/ddp/model.h"

namespace paceline::ddp {

// Makes the gradient of each sparse parameter with `used` the sum of all ranks' gradients, each
// multiplied by its rank's `share`: one call of the group for each, in the order of the parameters.
// Collective.
void reduce_sparse(const std::vector<NamedTensor>& parameters, const std::vector<bool>& used,
                   double share, const ProcessGroup& group);

// The same on a rank that has no gradients and needs none.
void reduce_sparse_zeros(const std::vector<NamedTensor>& parameters, const std::vector<bool>& used,
                         const ProcessGroup& group);

}  // namespace paceline::ddp
