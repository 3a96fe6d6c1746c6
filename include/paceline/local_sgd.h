#pragma once

/// @file
/// Post-local SGD: gradients averaged within subgroups, parameters now and then over all ranks.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <paceline/api.h>
#include <paceline/comm_hooks.h>
#include <paceline/distributed.h>

namespace paceline {
namespace comm_hooks {

/// Options of PostLocalSgdState, with PyTorch's names and defaults. The same on all ranks.
struct PostLocalSgdOptions {
  /// The ranks that average gradients at first. Unset: those of the model.
  std::optional<ProcessGroup> process_group{};
  /// The ranks that average gradients afterwards. Unset: the ranks of this rank's node.
  std::optional<ProcessGroup> subgroup{};
  /// How many steps average gradients over process_group. Not negative.
  std::int64_t start_local_sgd_iter = 0;
  /// Whether the later steps average gradients over the subgroup; otherwise they do not average.
  bool post_local_gradient_all_reduce = true;
};

/// The state of post-local SGD (Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR
/// 2020) in one model. A handle: copies refer to the same state.
///
///     comm_hooks::PostLocalSgdState state({.start_local_sgd_iter = 100});
///     model.register_comm_hook(comm_hooks::post_local_sgd(state));
///     PeriodicModelAverager averager({.period = 4, .warmup_steps = 100});
///     ...
///       optimizer.step();
///       averager.average_parameters(model.parameters());
class PACELINE_API PostLocalSgdState {
 public:
  /// Collective over the world if subgroup is unset. Throws UsageError for a negative number of
  /// steps.
  explicit PostLocalSgdState(const PostLocalSgdOptions& options);

  /// The number of steps. Not during a backward.
  at::IValue state_dict() const;
  /// Takes back what state_dict returned, before a backward. Throws Error for another value.
  void load_state_dict(const at::IValue& value);

 private:
  friend CommHook post_local_sgd(const PostLocalSgdState& state);
  struct [[gnu::visibility("hidden")]] Impl;
  std::shared_ptr<Impl> impl_;
};

/// The hook of post-local SGD, for one model: throws UsageError for a state that has a hook
/// already. After start_local_sgd_iter steps, ranks of different subgroups have different
/// parameters until a model averager makes them equal: give CheckpointDirectory
/// `Stateful(model).per_rank()`, and the same of the optimizer.
PACELINE_API CommHook post_local_sgd(const PostLocalSgdState& state);

}  // namespace comm_hooks

/// Options of PeriodicModelAverager, with PyTorch's names. The same on all ranks.
struct PeriodicModelAveragerOptions {
  std::int64_t period = 1;        ///< The number of steps between two averages. Positive.
  std::int64_t warmup_steps = 0;  ///< How many steps pass before the first one. Not negative.
  ProcessGroup process_group{};   ///< The ranks to average over.
};

/// Averages a model's parameters over all ranks in every period-th step: with post_local_sgd's
/// start_local_sgd_iter for warmup_steps. CheckpointDirectory saves it.
class PACELINE_API PeriodicModelAverager {
 public:
  /// Throws UsageError for an option out of its range.
  explicit PeriodicModelAverager(const PeriodicModelAveragerOptions& options);

  /// Counts a step, and averages in place the parameters that have a gradient, if it is time.
  /// Collective; call it after the optimizer's step.
  void average_parameters(const std::vector<at::Tensor>& parameters);

  at::IValue state_dict() const { return step_; }  ///< The number of steps.
  void load_state_dict(const at::IValue& value);   ///< Throws Error for another value.

 private:
  PeriodicModelAveragerOptions options_;
  std::int64_t step_ = 0;
};

/// Options of HierarchicalModelAverager, with PyTorch's names. The same on all ranks.
struct HierarchicalModelAveragerOptions {
  /// (period, group size), ascending in both; each size divides the number of ranks of the world,
  /// which is the last one. PyTorch's process_group does not exist here.
  std::vector<std::pair<std::int64_t, int>> period_group_sizes{};
  std::int64_t warmup_steps = 0;  ///< How many steps pass before the first one. Not negative.
};

/// Averages a model's parameters in every step that a period divides, over groups of consecutive
/// ranks of the world: of several such periods, with the group of the largest one (Wang et al.,
/// "Demystifying Why Local Aggregation Helps", AAAI 2022). CheckpointDirectory saves it.
class PACELINE_API HierarchicalModelAverager {
 public:
  /// Collective over the world. Throws UsageError for invalid options.
  explicit HierarchicalModelAverager(const HierarchicalModelAveragerOptions& options);

  /// As PeriodicModelAverager's.
  void average_parameters(const std::vector<at::Tensor>& parameters);

  at::IValue state_dict() const { return step_; }  ///< The number of steps.
  void load_state_dict(const at::IValue& value);   ///< Throws Error for another value.

 private:
  std::vector<std::pair<std::int64_t, ProcessGroup>> levels_;
  std::int64_t warmup_steps_;
  std::int64_t step_ = 0;
};

}  // namespace paceline
