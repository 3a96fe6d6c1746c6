#pragma once

/// @file
/// Parameters that all ranks of a machine share, for Hogwild (Niu et al., "Hogwild!: A Lock-Free
/// Approach to Parallelizing Stochastic Gradient Descent", NeurIPS 2011).

#include <torch/nn/pimpl.h>

#include <paceline/api.h>
#include <paceline/distributed.h>
#include <paceline/module_or_holder.h>
#include <paceline/named_tensors.h>

namespace paceline {

/// Moves a module's parameters and buffers into memory that all ranks of the group share, as
/// Python's `module.share_memory()` does before processes are forked. They begin with the values of
/// the group's first rank. Collective over the group.
///
///     share_memory(*model);
///     torch::optim::SGD sgd(model->parameters(), 0.01);   // each rank's own, without locks
///     for (...) { ...; loss.backward(); sgd.step(); }
///
/// Nothing orders what the ranks read and write: a step may read parameters in the middle of
/// another rank's step, and of two additions to one element at the same time, one may be lost. That
/// is meant for sparse updates, which rarely meet. Gradients and the states of optimizers are each
/// rank's own. For a state that all have, call barrier() first.
///
/// The tensors are contiguous then. Their memory lives as long as a process has one of them, also
/// without the world and after other ranks have ended; it cannot be freed earlier. Views that were
/// taken before keep the earlier memory.
///
/// Throws UsageError unless the group is over the backend paceline and on one node, and for tensors
/// that are not dense tensors on the CPU or overlap in memory; Mismatch that names the first
/// difference between the ranks' models.
PACELINE_API void share_memory(torch::nn::Module& module, const ProcessGroup& group = {});
/// The same. Throws UsageError for a null module.
template <typename M>
void share_memory(const torch::nn::ModuleHolder<M>& holder, const ProcessGroup& group = {}) {
  share_memory(detail::checked_module(detail::module_of(holder), "share_memory"), group);
}
/// The same for named tensors.
PACELINE_API void share_memory(const NamedTensors& tensors, const ProcessGroup& group = {});

}  // namespace paceline
