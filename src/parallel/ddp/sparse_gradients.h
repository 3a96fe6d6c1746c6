#pragma once

#include <vector>

#include "parallel/ddp/model.h"

namespace paceline::ddp {

// Replaces each used sparse parameter's gradient by the ranks' sum, weighted by `share`: one
// all_reduce for each, in the order of the parameters. Collective.
void reduce_sparse(const std::vector<NamedTensor>& parameters, const std::vector<bool>& used,
                   double share, const ProcessGroup& group);

// Matches reduce_sparse on a rank without gradients, which keeps no result.
void reduce_sparse_zeros(const std::vector<NamedTensor>& parameters, const std::vector<bool>& used,
                         const ProcessGroup& group);

}  // namespace paceline::ddp
