#pragma once

/// @file
/// Pipeline: the layers of a model divided over ranks.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <chrono>
#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <paceline/api.h>
#include <paceline/comm_hooks.h>
#include <paceline/ddp_options.h>
#include <paceline/distributed.h>
#include <paceline/error.h>
#include <paceline/for_each_tensor.h>
#include <paceline/module_or_holder.h>

namespace paceline {

/// The order in which a stage runs forwards and backwards of its micro-batches. Backwards always
/// run in the order of micro-batches.
enum class PipelineSchedule {
  /// All forwards, then all backwards (Huang et al., "GPipe", NeurIPS 2019). A stage keeps the
  /// activations of all micro-batches. PyTorch's ScheduleGPipe.
  gpipe,
  /// As few forwards as fill the pipeline, then a backward after each forward (Narayanan et al.,
  /// "PipeDream", SOSP 2019). As fast, and stage s of p keeps the activations of p - s
  /// micro-batches
  /// at most. PyTorch's Schedule1F1B.
  one_f_one_b
};

/// Options of Pipeline. The same on all ranks, except for `ddp`.
struct PipelineOptions {
  /// The number of micro-batches that a batch is divided into; 1: stages work one after the other.
  /// It must divide the batch. The more there are, the less stages wait for each other: of each
  /// stage's time, (p - 1) / (m + p - 1) for m micro-batches on p equal stages.
  std::int64_t n_microbatches = 1;
  PipelineSchedule schedule = PipelineSchedule::one_f_one_b;  ///< The order of work.
  ProcessGroup process_group{};                               ///< Rank s of it runs stage s.
  /// If set, several pipelines train together: the stage's gradients are averaged over
  /// ddp->process_group, the ranks that run the same stage, while the last micro-batch's backward
  /// runs. With Average::ranks or Average::sum, and without logical_ranks.
  std::optional<DdpOptions> ddp{};
};

/// One forward or backward of a micro-batch.
struct PipelineAction {
  /// Which of them.
  enum class Kind {
    forward,  ///< Of the stage's module, and on the last stage the loss.
    backward  ///< The gradients of parameters and inputs.
  };
  Kind kind = Kind::forward;         ///< What it was.
  std::int64_t microbatch = 0;       ///< From 0.
  std::chrono::nanoseconds begin{};  ///< Since the begin of the step.
  std::chrono::nanoseconds end{};    ///< The same.
};

/// What a stage has done.
struct PipelineStats {
  std::uint64_t steps = 0;               ///< Since construction.
  std::int64_t bytes_sent = 0;           ///< Activations and gradients, of all steps.
  std::int64_t bytes_received = 0;       ///< The same.
  std::vector<PipelineAction> last;      ///< The last step's, without waits for other stages.
  std::chrono::nanoseconds last_time{};  ///< How long the last step took.
};

namespace detail {

/// The part that does not depend on the stage's type.
class PACELINE_API PipelineHandle {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Forward = std::function<Tensors(const Tensors& inputs)>;
  using Loss = std::function<at::Tensor(const Tensors& outputs, const at::Tensor& target)>;

  PipelineHandle(torch::nn::Module& stage, Forward forward, Loss loss,
                 const PipelineOptions& options);
  PipelineHandle(PipelineHandle&&) noexcept;
  PipelineHandle& operator=(PipelineHandle&&) noexcept;
  ~PipelineHandle();

  at::Tensor step(const Tensors& inputs, const at::Tensor& target);
  Tensors evaluate(const Tensors& inputs);
  void register_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook);
  const PipelineStats& stats() const;

 private:
  class [[gnu::visibility("hidden")]] Impl;
  std::unique_ptr<Impl> impl_;
};

/// As many tensors as stages may exchange for a micro-batch.
inline constexpr std::size_t kMaxStageTensors = 8;

[[noreturn]] PACELINE_API void throw_wrong_inputs(std::size_t count);

/// A visitor of for_each_tensor.
struct KeepOutputs {
  using VisitsUndefined = void;
  PipelineHandle::Tensors& outputs;
  void operator()(const at::Tensor& tensor) const { outputs.push_back(tensor); }
};

/// Calls a stage's forward with a vector of tensors, or with each tensor as an argument.
template <std::size_t N = 1, typename M>
PipelineHandle::Tensors run_stage(M& stage, const PipelineHandle::Tensors& inputs) {
  PipelineHandle::Tensors outputs;
  const auto keep = [&](const auto& output) { for_each_tensor(output, KeepOutputs{outputs}); };
  if constexpr (
      requires { stage.forward(inputs); } && !requires { stage.forward(at::Tensor()); }) {
    keep(stage.forward(inputs));
    return outputs;
  } else if constexpr (N > kMaxStageTensors) {
    throw_wrong_inputs(inputs.size());
  } else {
    if (inputs.size() != N) return run_stage<N + 1>(stage, inputs);
    const bool is_called = [&]<std::size_t... I>(std::index_sequence<I...>) {
      if constexpr (requires { stage.forward(inputs[I]...); }) {
        keep(stage.forward(inputs[I]...));
        return true;
      } else {
        return false;
      }
    }
    (std::make_index_sequence<N>());
    if (!is_called) throw_wrong_inputs(N);
    return outputs;
  }
}

PACELINE_API const at::Tensor& only_output(const PipelineHandle::Tensors& outputs);

template <typename Loss>
PipelineHandle::Loss loss_of_outputs(Loss loss) {
  using Tensors = PipelineHandle::Tensors;
  return [loss = std::move(loss)](const Tensors& outputs, const at::Tensor& target) mutable {
    if constexpr (std::is_invocable_v<Loss&, const at::Tensor&, const at::Tensor&>) {
      return loss(only_output(outputs), target);
    } else {
      constexpr bool kTakesAll = std::is_invocable_v<Loss&, const Tensors&, const at::Tensor&>;
      static_assert(kTakesAll,
                    "a Pipeline's loss takes the last stage's output, or a std::vector of its "
                    "outputs, and the target");
      if constexpr (kTakesAll) {
        return loss(outputs, target);
      } else {
        return at::Tensor();
      }
    }
  };
}

}  // namespace detail

/// One stage of a model whose layers are divided over the ranks of a group. A batch is divided into
/// micro-batches, which pass through the stages one behind the other. All ranks of a pipeline read
/// the same batches, so a sampler's replicas are pipelines, not ranks.
///
///     const auto stage = get_rank() == 0 ? first_half() : second_half();  // torch::nn::Sequential
///     Pipeline pipeline(stage, torch::nn::CrossEntropyLoss(), {.n_microbatches = 8});
///     torch::optim::SGD sgd(stage->parameters(), 0.1);
///     for (auto& [x, y] : loader) {
///       sgd.zero_grad();
///       pipeline.step(x, y);
///       sgd.step();
///     }
///
/// The stage's forward takes and returns one tensor or several, at most 8: as arguments, or as a
/// std::vector; as a vector, tuple, or what for_each_tensor finds. Each stage passes its outputs on
/// to the next one's forward, also undefined ones, and in their memory format, such as
/// channels_last. Sizes and types may change from step to step.
///
/// After a step, gradients are the mean over micro-batches: bit for bit those of one process that
/// runs `(loss(forward(x), y) / m).backward()` for one micro-batch after the other, with m of them.
///
/// Its tensors are on the device of the stage's first parameter, or on the CPU. Use it on one
/// thread at a time. Its messages have a tag of their own.
template <typename M>
class Pipeline {
 public:
  /// `loss` is called on the last stage: with the output, or the std::vector of outputs, and the
  /// target of a micro-batch. It returns their mean loss, one element. Collective over the group,
  /// and over that of PipelineOptions::ddp. Throws UsageError for a null module, if the ranks'
  /// options differ, or if a rank of ddp->process_group runs another stage.
  template <typename Loss>
  Pipeline(std::shared_ptr<M> stage, Loss loss, const PipelineOptions& options = {})
      : module_(std::move(stage)),
        handle_(
            detail::checked_module(module_, "Pipeline"),
            [module = module_](const std::vector<at::Tensor>& inputs) {
              return detail::run_stage(*module, inputs);
            },
            detail::loss_of_outputs(std::move(loss)), options) {}
  /// The same for the module of a TORCH_MODULE's holder.
  template <typename Loss>
  Pipeline(const torch::nn::ModuleHolder<M>& stage, Loss loss, const PipelineOptions& options = {})
      : Pipeline(detail::module_of(stage), std::move(loss), options) {}

  /// Runs forwards and backwards of a batch, whose tensors have the samples in their first
  /// dimension. `inputs` are read on the first stage, `target` on the last; others may pass them
  /// too, or undefined tensors. Stages compare the first 64 KiB of targets of the same type and
  /// sizes on the CPU. Collective. Returns the mean of the micro-batches' losses on the last stage,
  /// and an undefined tensor on the others. Gradients are added to .grad, as always.
  ///
  /// Throws UsageError if the number of samples is not a multiple of n_microbatches, on every stage
  /// that passes a tensor, if the last stage passes inputs with another number than its target has,
  /// or if the loss depends on nothing that requires a gradient; PeerLost, Timeout or Mismatch if
  /// another stage fails or does something else, and Mismatch if a stage before has another target.
  /// If a stage throws once its step has begun, other stages wait for it: its group is aborted,
  /// they throw PeerLost with its text, and the group is of no further use. Over other backends
  /// than paceline they learn of it only once its World ends.
  at::Tensor step(const std::vector<at::Tensor>& inputs, const at::Tensor& target) {
    return handle_.step(inputs, target);
  }
  /// The same for one input.
  at::Tensor step(const at::Tensor& input, const at::Tensor& target) {
    return handle_.step({input}, target);
  }
  /// Runs forwards without gradients. Collective. Returns the outputs for the batch on the last
  /// stage, and nothing on the others. A batch may have any number of samples; if they are fewer
  /// than n_microbatches, there are fewer micro-batches.
  std::vector<at::Tensor> evaluate(const std::vector<at::Tensor>& inputs) {
    return handle_.evaluate(inputs);
  }
  /// The same for one input.
  std::vector<at::Tensor> evaluate(const at::Tensor& input) { return handle_.evaluate({input}); }

  /// With PipelineOptions::ddp: as DistributedDataParallel::register_comm_hook. Throws UsageError
  /// without.
  void register_comm_hook(CommHook hook) {
    handle_.register_comm_hook(detail::make_comm_hook(std::move(hook)));
  }

  /// The stage.
  const std::shared_ptr<M>& module() const { return module_; }
  /// What this stage has done. Not during a step.
  const PipelineStats& stats() const { return handle_.stats(); }

 private:
  std::shared_ptr<M> module_;
  detail::PipelineHandle handle_;
};

/// From a TORCH_MODULE's holder.
template <typename M, typename Loss>
Pipeline(const torch::nn::ModuleHolder<M>&, Loss, PipelineOptions = {}) -> Pipeline<M>;

}  // namespace paceline
