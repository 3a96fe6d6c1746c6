#pragma once

/// @file
/// Batch normalization over the batches of all ranks.

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <memory>
#include <optional>

#include <paceline/api.h>
#include <paceline/distributed.h>
#include <paceline/module_or_holder.h>

namespace torch::jit {
struct Module;
}

namespace paceline {

/// The arguments of torch.nn.SyncBatchNorm, in their order.
struct SyncBatchNormOptions {
  /// The number of channels C of inputs (N, C, ...).
  std::int64_t num_features;
  /// Added to the variance, so that its root is never zero.
  double eps = 1e-5;
  /// The weight of a step in the running statistics. Unset: they are averages over all steps.
  std::optional<double> momentum = 0.1;
  /// Whether there are parameters `weight` and `bias`.
  bool affine = true;
  /// Whether there are running statistics, which evaluation uses.
  bool track_running_stats = true;
  /// The ranks whose batches are normalized together.
  ProcessGroup process_group{};
};

/// Batch normalization (Ioffe and Szegedy, ICML 2015) over the batches of all ranks together.
/// Batches may differ in size, and be empty on some ranks. In evaluation, in a world of one and
/// without a world it equals BatchNorm. Inputs are (N, C, ...), of floating type, on the CPU or on
/// CUDA devices. Parameters and buffers have BatchNorm's names, so that checkpoints of either fit
/// the other.
///
/// In training, a forward and the backward through it are collective over the group. Statistics are
/// gathered in float64 on the CPU; on CUDA devices in float32, or in float64 for inputs of float64.
/// Gradients are exact up to rounding. The input's gradient is the same as in one process with the
/// whole batch. The gradients of weight and bias are this rank's share;
/// DistributedDataParallel averages them as usual. If batches differ in size, let each rank's loss
/// be a sum over its samples, divided by the same number on all ranks. With a mean over the rank's
/// own samples, samples of small batches would have more weight.
///
/// Use it through its holder SyncBatchNorm, which TORCH_MODULE makes.
class PACELINE_API SyncBatchNormImpl : public torch::nn::Module {
 public:
  /// With defaults for everything else.
  explicit SyncBatchNormImpl(std::int64_t num_features)
      : SyncBatchNormImpl(SyncBatchNormOptions{num_features}) {}
  /// Throws UsageError if num_features is not positive.
  explicit SyncBatchNormImpl(SyncBatchNormOptions options);

  /// Normalizes `input`. Throws UsageError if its shape or type does not fit.
  at::Tensor forward(const at::Tensor& input);
  /// Resets running statistics, weights to 1 and biases to 0.
  void reset_parameters();
  /// Prints the options, as BatchNorm does.
  void pretty_print(std::ostream& stream) const override;

  SyncBatchNormOptions options;    ///< As given.
  at::Tensor weight;               ///< (C); undefined without affine.
  at::Tensor bias;                 ///< (C); undefined without affine.
  at::Tensor running_mean;         ///< (C); undefined without track_running_stats.
  at::Tensor running_var;          ///< (C); undefined without track_running_stats.
  at::Tensor num_batches_tracked;  ///< int64; undefined without track_running_stats.
};
TORCH_MODULE(SyncBatchNorm);

/// Makes every torch::nn::BatchNorm1d, 2d and 3d in the module, itself included, normalize over the
/// batches of all ranks of `group` in training, as SyncBatchNorm does. Modules keep their types, so
/// members of any type work: until a module is destroyed, its calls of batch_norm run a kernel of
/// Paceline. A second conversion changes the group. The result of clone() is not converted; convert
/// it too.
///
/// LibTorch's BatchNorm refuses a batch with at most one value for each channel on this rank,
/// before it calls batch_norm. Use a SyncBatchNorm if there are such batches.
///
/// Throws UsageError, and changes nothing, in two cases:
/// - a BatchNorm has no running statistics, which identify its calls;
/// - another kind of module has a buffer "running_mean" of its own, as a wrapper of a TorchScript
///   module may.
PACELINE_API void convert_sync_batchnorm(torch::nn::Module& module, const ProcessGroup& group = {});

/// The same; returns the module. Throws UsageError for a null module.
template <typename M>
std::shared_ptr<M> convert_sync_batchnorm(std::shared_ptr<M> module,
                                          const ProcessGroup& group = {}) {
  convert_sync_batchnorm(detail::checked_module(module, "convert_sync_batchnorm"), group);
  return module;
}
/// The same.
template <typename M>
torch::nn::ModuleHolder<M> convert_sync_batchnorm(const torch::nn::ModuleHolder<M>& module,
                                                  const ProcessGroup& group = {}) {
  convert_sync_batchnorm(detail::module_of(module), group);
  return module;
}
/// Does not compile: a TorchScript module cannot be converted.
template <std::same_as<torch::jit::Module> M>
void convert_sync_batchnorm(const M& /*module*/, const ProcessGroup& /*group*/ = {}) {
  static_assert(!std::same_as<M, torch::jit::Module>,
                "convert_sync_batchnorm cannot convert a TorchScript module: build the model of "
                "torch::nn modules and load its tensors");
}

}  // namespace paceline
