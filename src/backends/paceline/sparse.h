#pragma once

#include <ATen/core/Tensor.h>

#include "backends/paceline/tensors.h"
#include "shm/collectives/group.h"

namespace paceline::backends {

// Throws unless the call sums one COO tensor on the CPU.
void check_sparse(const Tensors& tensors, const c10d::ReduceOp& op);

// How many calls of the group sum_of_sparse makes.
inline constexpr std::size_t kCallsOfSparse = 3;

// The sum of every rank's tensor, coalesced and with the same bits on all ranks: all of them gather
// what each has and add it in the order of ranks. Throws UsageError, on all ranks alike, if the
// shapes differ.
at::Tensor sum_of_sparse(shm::Collectives& group, const at::Tensor& tensor);

}  // namespace paceline::backends
