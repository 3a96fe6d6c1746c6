#pragma once

/// @file
/// Averages of a model over the steps of a training.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/nn/pimpl.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <paceline/api.h>
#include <paceline/module_or_holder.h>

namespace paceline::optim {

/// Options of ExponentialMovingAverage.
struct ExponentialMovingAverageOptions {
  double decay = 0.999;  ///< The share of the average that an update keeps; in [0, 1].
  /// Whether buffers are averaged too. If not, an update copies them.
  bool use_buffers = false;
};

/// The exponential moving average of a model's parameters, which often generalises better than the
/// parameters themselves: the values of Python's torch.optim.swa_utils.AveragedModel with
/// get_ema_multi_avg_fn(decay).
///
///     optim::ExponentialMovingAverage average(*model.module(), {.decay = 0.99});
///     for (...) { ...; sgd.step(); average.update(); }
///     {
///       const auto applied = average.apply();
///       evaluate(model);  // with the averages
///     }                   // with the parameters again
///
/// Beside DistributedDataParallel every rank computes the same averages, without communication,
/// since the parameters are the same. Buffers are each rank's own: before an update, broadcast
/// the buffers that a forward changes.
///
/// It keeps the model's tensors alive, but not the module. Use it on one thread at a time.
class PACELINE_API ExponentialMovingAverage {
 private:
  class [[gnu::visibility("hidden")]] Impl;

 public:
  /// Of the parameters and buffers of a module. The averages begin as copies. Throws UsageError for
  /// a decay out of range, and for tensors that are not dense.
  explicit ExponentialMovingAverage(const torch::nn::Module& module,
                                    const ExponentialMovingAverageOptions& options = {});
  /// The same. Throws UsageError for a null module.
  template <typename M>
  explicit ExponentialMovingAverage(const torch::nn::ModuleHolder<M>& holder,
                                    const ExponentialMovingAverageOptions& options = {})
      : ExponentialMovingAverage(
            detail::checked_module(detail::module_of(holder), "ExponentialMovingAverage"),
            options) {}
  /// Of named tensors: all count as parameters.
  explicit ExponentialMovingAverage(
      const std::vector<std::pair<std::string, at::Tensor>>& parameters,
      const ExponentialMovingAverageOptions& options = {});
  ~ExponentialMovingAverage();
  /// `other` may only be assigned to or destroyed afterwards.
  ExponentialMovingAverage(ExponentialMovingAverage&& other) noexcept;
  /// The same.
  ExponentialMovingAverage& operator=(ExponentialMovingAverage&& other) noexcept;

  /// Takes the model's current values into the averages: average += (1 - decay) * (value -
  /// average). The first update copies them. Call it after each step of the optimizer. Throws
  /// UsageError while the averages are applied.
  void update();
  /// The number of updates.
  std::int64_t n_averaged() const;
  /// The averages by the names of the model's tensors. They share memory with this object.
  torch::OrderedDict<std::string, at::Tensor> averages() const;

  /// The model has the averages while this exists. May outlive the ExponentialMovingAverage.
  class [[nodiscard]] PACELINE_API Applied {
   public:
    /// Gives the model its own values back.
    ~Applied();
    Applied(const Applied&) = delete;
    Applied& operator=(const Applied&) = delete;

   private:
    friend class ExponentialMovingAverage;
    [[gnu::visibility("hidden")]] explicit Applied(std::shared_ptr<Impl> impl);

    std::shared_ptr<Impl> impl_;
  };
  /// Copies the averages into the model's tensors until the returned object is destroyed, for an
  /// evaluation. It needs the memory of the model once more. A forward from before must not run its
  /// backward afterwards. Throws UsageError if they are applied already.
  Applied apply();

  /// The state of Python's AveragedModel: `n_averaged`, and the averages as "module." and a name.
  at::IValue state_dict() const;
  /// Sets averages and n_averaged. Throws Error, and changes nothing, if a name is missing or
  /// unknown, or if a shape differs.
  void load_state_dict(const at::IValue& state);

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace paceline::optim
