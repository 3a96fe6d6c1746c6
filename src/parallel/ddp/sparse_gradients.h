#pragma once

#include <vector>

#include "parallel/ddp/model.h"

namespace paceline::ddp {

// Makes the gradients of sparse parameters with `used` the sums of the ranks', each multiplied by
// its rank's `share`: one call of the group for each, in the order of the parameters. Collective.
void reduce_sparse(const std::vector<NamedTensor>& parameters, const std::vector<bool>& used,
                   double share, const ProcessGroup& group);

// The same on a rank that has none and wants none.
void reduce_sparse_zeros(const std::vector<NamedTensor>& parameters, const std::vector<bool>& used,
                         const ProcessGroup& group);

}  // namespace paceline::ddp
