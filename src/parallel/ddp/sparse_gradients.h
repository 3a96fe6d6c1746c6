#pragma once

#include <span>
#include <vector>

#include "parallel/ddp/model.h"
#include "shm/buckets/leaf_plan.h"

namespace paceline::ddp {

// Replaces each used sparse parameter's gradient by the ranks' sum, weighted by `share`: one
// all_reduce for each, in the order of the parameters, on the CPU. Collective.
void reduce_sparse(const std::vector<NamedTensor>& parameters, const std::vector<bool>& used,
                   double share, const ProcessGroup& group);

// By leaf of this rank: the gradient of each parameter; undefined if it has none.
using SparseLeaves = std::vector<std::vector<at::Tensor>>;

// As reduce_sparse, for ranks with leaves: adds them up in the order of shm::Tree, which leaves out
// rows that a leaf does not have. `weights`: of this rank's leaves; empty if all are 1. `sums`:
// whether they are not averaged. Collective.
void reduce_sparse_leaves(const std::vector<NamedTensor>& parameters, const SparseLeaves& leaves,
                          std::span<const double> weights, bool sums, const std::vector<bool>& used,
                          const shm::LeafPlan& plan, const ProcessGroup& group);

// Matches reduce_sparse on a rank without gradients, which keeps no result.
void reduce_sparse_zeros(const std::vector<NamedTensor>& parameters, const std::vector<bool>& used,
                         const ProcessGroup& group);

}  // namespace paceline::ddp
