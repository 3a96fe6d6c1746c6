#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <memory>
#include <optional>

#include <paceline/api.h>
#include <paceline/distributed.h>

namespace torch::jit {
struct Module;
}

namespace paceline {

// The arguments of torch.nn.SyncBatchNorm, in their order.
struct SyncBatchNormOptions {
  std::int64_t num_features;
  double eps = 1e-5;
  // Nothing: running statistics are averages over all steps.
  std::optional<double> momentum = 0.1;
  bool affine = true;
  bool track_running_stats = true;
  ProcessGroup process_group{};  // by default the world
};

// Batch normalization (Ioffe and Szegedy, ICML 2015) whose mean and variance in training are those
// of the batches of all ranks together, which may differ in size, also be empty on some. In
// evaluation, in a world of one and without a world it is BatchNorm. Inputs are (N, C, ...), of
// floating type, on the CPU. Parameters and buffers have BatchNorm's names, so checkpoints of
// either fit the other.
//
// In training, a forward and the backward through it are collective calls over the group.
// Statistics are gathered in float64. Gradients are exact: those of the input are what one process
// would get with the whole batch; those of weight and bias are this rank's share of them, as for
// any parameter, and DistributedDataParallel makes the average. Where batches differ in size, let
// the loss of each rank be a sum over samples divided by the same number on all ranks: a mean over
// the rank's own samples would weigh those of small batches more, in what the ranks exchange here.
class PACELINE_API SyncBatchNormImpl : public torch::nn::Module {
 public:
  explicit SyncBatchNormImpl(std::int64_t num_features)
      : SyncBatchNormImpl(SyncBatchNormOptions{num_features}) {}
  explicit SyncBatchNormImpl(SyncBatchNormOptions options);

  at::Tensor forward(const at::Tensor& input);
  void reset_parameters();
  void pretty_print(std::ostream& stream) const override;

  SyncBatchNormOptions options;
  at::Tensor weight;
  at::Tensor bias;
  at::Tensor running_mean;
  at::Tensor running_var;
  at::Tensor num_batches_tracked;
};
TORCH_MODULE(SyncBatchNorm);

// Makes every torch::nn::BatchNorm1d, 2d and 3d in the module, itself included, normalize over the
// batches of all ranks of `group` when it trains, as SyncBatchNorm does. The modules stay what they
// are, so that members of any type work; it is their call of batch_norm that is answered
// differently, from now on and until they are gone. Calling it again changes the group. What
// clone() makes of a module is not converted: convert it, too.
//
// LibTorch's BatchNorm refuses a batch that has one value or none for each channel of this rank
// before its call could be answered: where there are such batches, declare a SyncBatchNorm.
//
// Throws UsageError, and then changes none, for a BatchNorm without running statistics, by which
// its calls in training are known, and for another module with a buffer "running_mean" of its own:
// as one has that stands for a TorchScript module, which cannot be converted.
PACELINE_API void convert_sync_batchnorm(torch::nn::Module& module, const ProcessGroup& group = {});

template <typename M>
std::shared_ptr<M> convert_sync_batchnorm(std::shared_ptr<M> module,
                                          const ProcessGroup& group = {}) {
  convert_sync_batchnorm(static_cast<torch::nn::Module&>(*module), group);
  return module;
}
template <typename M>
torch::nn::ModuleHolder<M> convert_sync_batchnorm(const torch::nn::ModuleHolder<M>& module,
                                                  const ProcessGroup& group = {}) {
  convert_sync_batchnorm(static_cast<torch::nn::Module&>(*module.ptr()), group);
  return module;
}
template <std::same_as<torch::jit::Module> M>
void convert_sync_batchnorm(const M& /*module*/, const ProcessGroup& /*group*/ = {}) {
  static_assert(!std::same_as<M, torch::jit::Module>,
                "convert_sync_batchnorm cannot convert a TorchScript module: build the model of "
                "torch::nn modules and load its tensors");
}

}  // namespace paceline
