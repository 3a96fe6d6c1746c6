#pragma once

/// @file
/// Scaled losses, for training in float16, as Python's torch.amp.GradScaler.

#include <ATen/core/ivalue.h>
#include <paceline/api.h>

#include <cstdint>
#include <memory>

namespace torch::optim {
class Optimizer;
}

namespace paceline {

/// Options of GradScaler.
struct GradScalerOptions {
  double init_scale = 65536;  ///< The first scale. Positive.
  /// The scale is multiplied by this after growth_interval steps without an infinite gradient. More
  /// than 1.
  double growth_factor = 2;
  double backoff_factor = 0.5;          ///< The same, after a step with one. In (0, 1).
  std::int64_t growth_interval = 2000;  ///< At least 1.
  /// False: scale() returns the loss, step() steps, and the rest does nothing.
  bool enabled = true;
};

/// Scales a loss up, so that small gradients do not become 0 in float16, and gradients down again
/// before the optimizer's step. Steps whose gradients are not all finite are left out, and the
/// scale becomes smaller; otherwise it grows from time to time.
///
///     GradScaler scaler;
///     for (...) {
///       sgd.zero_grad();
///       {
///         const autocast guard(at::kCUDA, {.dtype = at::kHalf});
///         loss = cross_entropy(model(x), y);
///       }
///       scaler.scale(loss).backward();
///       scaler.unscale_(sgd);                       // only to clip gradients before the step
///       torch::nn::utils::clip_grad_norm_(model.parameters(), 1);
///       scaler.step(sgd);
///       scaler.update();
///     }
///
/// Beside DistributedDataParallel, every rank has the same gradients, so all leave out the same
/// steps, without communication. For losses and parameters on one device, the CPU included. Use it
/// on one thread at a time.
class PACELINE_API GradScaler {
 public:
  /// Throws UsageError for options out of range.
  explicit GradScaler(const GradScalerOptions& options = {});
  ~GradScaler();
  /// `other` may only be assigned to or destroyed afterwards.
  GradScaler(GradScaler&& other) noexcept;
  /// The same.
  GradScaler& operator=(GradScaler&& other) noexcept;

  /// The loss, times the scale.
  [[nodiscard]] at::Tensor scale(const at::Tensor& loss);
  /// Divides the gradients of the optimizer's parameters by the scale. Call it at most once between
  /// two calls of update(), before step(), which calls it otherwise. Throws UsageError if it was
  /// called already, before the first scale(), for gradients in float16, and for gradients on
  /// another device than the loss.
  void unscale_(torch::optim::Optimizer& optimizer);
  /// Runs the optimizer's step, unless a gradient is infinite or NaN; returns whether it did. Waits
  /// for the device. Throws UsageError if it was called already since update(), if none of the
  /// optimizer's parameters has a gradient, and as unscale_.
  bool step(torch::optim::Optimizer& optimizer);
  /// Adjusts the scale. Call it after the steps of all optimizers. Throws UsageError if there was
  /// neither a step nor an unscale_ of gradients.
  void update();
  /// The scale; 1 if it is not enabled. Waits for the device.
  [[nodiscard]] double get_scale() const;

  /// The state of Python's: `scale`, the options, and `_growth_tracker`.
  [[nodiscard]] at::IValue state_dict() const;
  /// Sets them. Throws Error, and changes nothing, for another state.
  void load_state_dict(const at::IValue& state);

 private:
  class [[gnu::visibility("hidden")]] Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace paceline
