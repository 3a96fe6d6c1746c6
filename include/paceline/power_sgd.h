#pragma once

/// @file
/// PowerSGD: gradients sent as products of two thin matrices.

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <optional>

#include <paceline/api.h>
#include <paceline/comm_hooks.h>
#include <paceline/distributed.h>

namespace paceline::comm_hooks {

/// Options of PowerSgdState, with PyTorch's names and defaults; without
/// batch_tensors_with_same_shape, which only saves calls, and compression_stats_logging_frequency:
/// see CompressionStats. The same on all ranks.
struct PowerSgdOptions {
  /// The ranks to average over. Unset: those of the model.
  std::optional<ProcessGroup> process_group{};
  /// r: a gradient of n x m elements is sent as r (n + m). At least 1; 1 to 4 are usual.
  int matrix_approximation_rank = 1;
  /// How many steps send whole gradients before compression starts. Not negative. Early gradients
  /// change much from step to step, so a start at 10 % of the steps usually costs no accuracy.
  std::int64_t start_power_sgd_iter = 1000;
  /// A gradient is compressed if that divides its size by more than this. Positive.
  double min_compression_rate = 2;
  /// Whether what compression leaves out of a gradient is added to the next one. This needs memory
  /// of the size of the gradients, and training rarely converges without.
  bool use_error_feedback = true;
  /// Whether Q begins as in the step before, and not as random numbers. Columns of zeros, which a
  /// gradient of zeros leaves behind, begin as random numbers again.
  bool warm_start = true;
  /// Added to the norms that vectors are divided by. Not negative. A vector of zeros stays zero
  /// even if this is 0; in PyTorch it then becomes NaN.
  double orthogonalization_epsilon = 0;
  /// Seeds the random numbers that Q begins with: the same as those of PyTorch for this seed.
  std::uint32_t random_seed = 0;
};

/// How much PowerSGD has sent, in elements of one rank, since its construction.
struct CompressionStats {
  std::int64_t numel_before = 0;  ///< Without compression.
  std::int64_t numel_after = 0;   ///< With it.
  /// numel_before / numel_after; 0 if nothing was sent.
  double compress_rate() const {
    return numel_after == 0 ? 0
                            : static_cast<double>(numel_before) / static_cast<double>(numel_after);
  }
};

/// What PowerSGD keeps between the steps of a model (Vogels, Karimireddy and Jaggi, "PowerSGD:
/// Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019). A handle:
/// copies refer to the same state.
///
///     comm_hooks::PowerSgdState state({.matrix_approximation_rank = 2});
///     model.register_comm_hook(comm_hooks::power_sgd(state));
///
/// A gradient of n rows, viewed as a matrix M of n x m, is sent as P Q^T. All ranks compute P = M Q
/// and add up their Ps, make P's columns orthonormal, compute Q = M^T P and average their Qs. Other
/// gradients are averaged whole. Given the same gradients, it computes what PyTorch's
/// powerSGD_hook does, up to rounding.
///
/// The state is kept by parameter. So a resumed run, of as many ranks, computes what the
/// interrupted one would have computed; but without warm_start, its first step draws other random
/// numbers, since its buckets are others. Let CheckpointDirectory save it as
/// `Stateful(state).per_rank()`.
class PACELINE_API PowerSgdState {
 public:
  /// Throws UsageError for an option out of its range.
  explicit PowerSgdState(const PowerSgdOptions& options = {});

  /// Since construction, of steps with compression. Not during a backward.
  CompressionStats compression_stats() const;
  /// A copy of the number of steps, the random state, the errors and the Qs. Not during a
  /// backward.
  at::IValue state_dict() const;
  /// Takes back what state_dict returned, before a backward. Throws Error for another value. If the
  /// value is of another model or of another matrix_approximation_rank, the next backward throws.
  void load_state_dict(const at::IValue& value);

 private:
  friend CommHook power_sgd(const PowerSgdState& state);
  class [[gnu::visibility("hidden")]] Impl;
  std::shared_ptr<Impl> impl_;
};

/// The hook of PowerSGD, for one model: throws UsageError for a state that has a hook already.
///
/// It waits for its first exchange of a bucket in the hook of the next bucket, and at the end of
/// the backward, so all ranks make its calls in the same order. A custom hook may call it, on the
/// thread that it was called on; on another thread it throws UsageError.
PACELINE_API CommHook power_sgd(const PowerSgdState& state);

}  // namespace paceline::comm_hooks
