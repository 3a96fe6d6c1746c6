#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <paceline/api.h>
#include <paceline/comm_hooks.h>
#include <paceline/ddp_stats.h>
#include <paceline/distributed.h>
#include <paceline/for_each_tensor.h>
#include <paceline/join.h>

namespace paceline {

// What gradients are averaged over.
enum class Average {
  ranks,   // each rank counts the same, as in PyTorch: right for equal batches
  samples  // each rank counts what it says with set_samples: right for any
};

// The fields come in the order of PyTorch's arguments; those after it are ours.
struct DdpOptions {
  // For a module on an accelerator, its device. Modules on the CPU have none.
  std::vector<at::Device> device_ids{};
  std::optional<at::Device> output_device{};
  // Whether rank 0's buffers, those that the module has at construction (BatchNorm's running
  // statistics, say) are copied to all ranks before a forward in training mode with grad mode on,
  // if the step before it was synchronised.
  bool broadcast_buffers = true;
  // Whether the ranks compare their models at construction, and start with rank 0's parameters and
  // buffers. If not, it is up to the program that they are the same.
  bool init_sync = true;
  // Who averages gradients; by default the world.
  ProcessGroup process_group{};
  // Gradients are reduced in buckets of at most this many MiB; a gradient alone may be larger.
  // Nothing: 25, and 1 for the first to be ready, so that communication starts early. With
  // zero_copy, gradients of 64 KiB and more are buckets of their own whatever this says.
  std::optional<double> bucket_cap_mb{};
  // Allows parameters that take no part in a step, for one more small reduction a step. A parameter
  // that took part on some rank gets the average, others counting as zero; one that took part
  // nowhere keeps its gradient as it was. Without it, such a parameter is an error that names it.
  bool find_unused_parameters = false;
  // Whether .grad becomes a view into its bucket, which the next step changes in place. Otherwise
  // it stays a tensor of its own, for one more copy. (PyTorch's default is false.)
  bool gradient_as_bucket_view = true;
  // Says that in every step each parameter gets as many gradients as in the first, on each rank.
  // Then backwards may be nested (activation checkpointing) and a parameter may get several
  // gradients, or none. Forwards must return tensors that for_each_tensor finds.
  bool static_graph = false;
  // Parameters by name, whose gradients are taken when param_to_hook_all_reduce has got its own;
  // until then they may be changed by whatever else the backward does.
  std::vector<std::string> delay_all_reduce_named_params{};
  std::string param_to_hook_all_reduce{};
  // With find_unused_parameters and no static_graph, leaves out buckets of which no parameter took
  // part, not in backwards under no_sync before either, and the reduction that tells ranks of each
  // other's: the same parameters must be unused on every rank.
  bool skip_all_reduce_unused_params = false;
  // Instead of bucket_cap_mb: the cap of the first bucket to be ready, of the second and so on. The
  // last holds for all that follow.
  std::vector<double> bucket_cap_mb_list{};

  // Whether large gradients are reduced where autograd has put them, with no copy: from 64 KiB on
  // they are born in shared memory (and gradient_as_bucket_view means the smaller ones). Takes
  // effect over backend paceline on the CPU, without a communication hook.
  bool zero_copy = true;
  Average average = Average::ranks;
  // Every so many synchronised steps, ranks compare fingerprints of all parameters, and of buffers
  // where broadcast_buffers keeps them equal, and throw Mismatch that names the first that differs,
  // and where. 0: never. It reads the model once.
  int check_sync_every = 0;
};

// Tensors under the names by which errors speak of them: {{"w", w}, {"b", b}}.
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

namespace detail {
class DdpCore;

// The part that knows no type of a model.
class PACELINE_API DdpHandle {
 public:
  DdpHandle(torch::nn::Module* module, const DdpOptions& options);
  DdpHandle(const NamedTensors& parameters, const NamedTensors& buffers, const DdpOptions& options);
  DdpHandle(DdpHandle&&) noexcept;
  DdpHandle& operator=(DdpHandle&&) noexcept;
  ~DdpHandle();

  void before_forward();
  void after_forward();
  bool watches_outputs() const;
  void watch_output(const at::Tensor& output);
  std::shared_ptr<bool> sync_switch() const;
  void set_samples(double count);
  void register_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook);
  Joinable& joinable() const;
  const DdpStats& stats() const;

 private:
  std::unique_ptr<DdpCore> core_;
};

// Stands for a module where there is none.
template <typename Function>
class TensorFunction {
 public:
  TensorFunction(const NamedTensors& parameters, Function function)
      : function_(std::move(function)) {
    for (const auto& [name, tensor] : parameters) parameters_.push_back(tensor);
  }
  template <typename... Args>
  decltype(auto) forward(Args&&... args) {
    constexpr bool kIsCallable = std::is_invocable_v<Function&, Args...>;
    static_assert(kIsCallable,
                  "the function that DistributedDataParallel was given as the model's forward does "
                  "not take these arguments");
    if constexpr (kIsCallable) return std::invoke(function_, std::forward<Args>(args)...);
  }
  std::vector<at::Tensor> parameters() const { return parameters_; }

 private:
  std::vector<at::Tensor> parameters_;
  Function function_;
};

struct NoFunction {};
}  // namespace detail

// While it lives, forwards of its DistributedDataParallel start steps that are not synchronised:
// gradients accumulate on each rank alone. Between synchronised steps all ranks run the same number
// of such backwards, unless they use Average::samples; forwards without a backward do not count.
// Move-only.
class [[nodiscard]] NoSyncGuard {
 public:
  explicit NoSyncGuard(std::shared_ptr<bool> sync, bool enabled)
      : sync_(enabled ? std::move(sync) : nullptr), before_(sync_ && *sync_) {
    if (sync_) *sync_ = false;
  }
  NoSyncGuard(NoSyncGuard&& other) noexcept = default;
  NoSyncGuard& operator=(NoSyncGuard&&) = delete;
  ~NoSyncGuard() {
    if (sync_) *sync_ = before_;
  }

 private:
  std::shared_ptr<bool> sync_;
  bool before_;
};

// Wraps a module so that every backward leaves the average of all ranks' gradients in its
// parameters, reduced bucket by bucket while the backward still runs (Li et al., "PyTorch
// Distributed", VLDB 2020). Construction is collective: parameters and buffers become rank 0's, and
// ranks whose parameters or buffers differ in number, name, shape, strides or type throw Mismatch
// that names the first.
//
// The forward decides, the backward obeys: whether a backward is synchronised was fixed by the last
// forward before it. After a synchronised backward, .grad of each parameter is a view into its
// bucket (see gradient_as_bucket_view), which the next one changes in place (it adds, as always):
// clone what is to be kept. A backward throws PeerLost, Timeout or Mismatch when another rank
// fails, Mismatch when the ranks have not done the same (docs/errors.md, Divergence), and Error for
// parameters that got no gradient (see find_unused_parameters). After a backward that threw,
// docs/errors.md says when the next forward can go on; all gradients are zero then.
//
// In a world of one it checks what it checks on several ranks, and gradients stay where they are. A
// checkpoint is that of module(): save it on rank 0, and load it before wrapping, on rank 0 at
// least, or afterwards on every rank; the optimizer's is loaded on every rank. Parameters may be
// frozen afterwards, on all ranks alike; those that are frozen at construction stay so. A closure
// that an optimizer calls as often as its result decides (LBFGS) returns the loss averaged over the
// ranks. Buffers follow rank 0 before training forwards only, so before an evaluation that all
// ranks share, broadcast them.
//
// Move-only, and no Module itself. Used by one thread at a time; the module must not gain or lose
// parameters meanwhile, nor move to another type or device. At most one wrapper around a parameter
// at a time. Where one backward goes through several models, their forwards come in the same order
// on all ranks. A forward may make collective calls of the group (docs/threading.md).
//
// A model that is no module, of TorchScript say, is given by its parameters and its forward:
//
//   DistributedDataParallel model({{"w", w}, {"b", b}}, [&](at::Tensor x) { return x.mm(w) + b; });
//
// M is then the function's type (for a member of a class, std::function's). Every forward with grad
// mode on counts as one in training mode, and gradients that are sparse tensors become dense.
template <typename M>
class DistributedDataParallel {
  static constexpr bool kIsModule = std::derived_from<M, torch::nn::Module>;
  using Model = std::conditional_t<kIsModule, M, detail::TensorFunction<M>>;
  using Function = std::conditional_t<kIsModule, detail::NoFunction, M>;

 public:
  explicit DistributedDataParallel(
      std::shared_ptr<M> module,
      const DdpOptions& options = {}) requires std::derived_from<M, torch::nn::Module>
      : module_(std::move(module)), handle_(module_.get(), options) {}
  explicit DistributedDataParallel(
      const torch::nn::ModuleHolder<M>& module,
      const DdpOptions& options = {}) requires std::derived_from<M, torch::nn::Module>
      : DistributedDataParallel(module.ptr(), options) {}
  // Throws UsageError for an undefined tensor and for a name that two have.
  DistributedDataParallel(const NamedTensors& parameters, Function forward,
                          const DdpOptions& options = {})
      : DistributedDataParallel(parameters, {}, std::move(forward), options) {}
  // `buffers`: state that is no parameter and follows rank 0, see broadcast_buffers.
  DistributedDataParallel(const NamedTensors& parameters, const NamedTensors& buffers,
                          Function forward, const DdpOptions& options = {})
      : module_(std::make_shared<Model>(parameters, std::move(forward))),
        handle_(parameters, buffers, options) {}
  explicit DistributedDataParallel(
      const NamedTensors& parameters,
      const DdpOptions& options = {}) requires std::same_as<M, detail::NoFunction>
      : DistributedDataParallel(parameters, Function(), options) {
    static_assert(!std::same_as<M, detail::NoFunction>,
                  "DistributedDataParallel of named tensors needs the model's forward after them, "
                  "a function");
  }
  template <std::derived_from<torch::nn::Module> Value>
  explicit DistributedDataParallel(const Value& /*module*/, const DdpOptions& options = {})
      : DistributedDataParallel(std::shared_ptr<M>(), options) {
    static_assert(!std::derived_from<Value, torch::nn::Module>,
                  "DistributedDataParallel shares its module: hold it by std::make_shared, or by a "
                  "TORCH_MODULE's holder, and pass that");
  }

  // The module's own forward, whatever its signature.
  template <typename... Args>
  decltype(auto) operator()(Args&&... args) {
    using Output = decltype(module_->forward(std::forward<Args>(args)...));
    handle_.before_forward();
    if constexpr (std::is_void_v<Output>) {
      module_->forward(std::forward<Args>(args)...);
      handle_.after_forward();
    } else {
      Output output = module_->forward(std::forward<Args>(args)...);
      handle_.after_forward();
      if (handle_.watches_outputs()) {
        for_each_tensor(output, [&](const at::Tensor& t) { handle_.watch_output(t); });
      }
      return output;
    }
  }
  template <typename... Args>
  decltype(auto) forward(Args&&... args) {
    return (*this)(std::forward<Args>(args)...);
  }

  // auto guard = model.no_sync(micro + 1 < accumulation);
  NoSyncGuard no_sync(bool enabled = true) { return NoSyncGuard(handle_.sync_switch(), enabled); }

  // With Average::samples, before every backward that is synchronised: over how many samples, or
  // tokens, this rank's loss is the mean, those of backwards under no_sync before it included. Not
  // negative; a rank with none has count 0, and what its gradients are does not matter.
  void set_samples(double count) { handle_.set_samples(count); }

  // Lets `hook` communicate every bucket from now on. Collective; before the first backward, and
  // once. Throws UsageError with Average::samples, which it could not heed.
  void register_comm_hook(CommHook hook) {
    handle_.register_comm_hook(detail::make_comm_hook(std::move(hook)));
  }
  // A hook as C++ extensions of PyTorch have it.
  void register_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook) {
    handle_.register_comm_hook(std::move(hook));
  }

  // Runs a training loop over inputs that may be uneven; see paceline::join.
  void join(const std::function<void()>& body, const JoinOptions& options = {}) {
    paceline::join({*this}, body, options);
  }
  operator Joinable&() const { return handle_.joinable(); }

  // What synchronised steps took.
  const DdpStats& stats() const { return handle_.stats(); }

  const std::shared_ptr<Model>& module() const {
    static_assert(kIsModule, "a DistributedDataParallel of named tensors has no module()");
    return module_;
  }
  std::vector<at::Tensor> parameters() const { return module_->parameters(); }
  void train(bool on = true) {
    static_assert(kIsModule,
                  "a DistributedDataParallel of named tensors has no modes: evaluate under "
                  "torch::NoGradGuard");
    if constexpr (kIsModule) module_->train(on);
  }
  void eval() { train(false); }

 private:
  std::shared_ptr<Model> module_;
  detail::DdpHandle handle_;
};

template <typename Holder>
requires std::derived_from<typename Holder::ContainedType, torch::nn::Module>
DistributedDataParallel(Holder, DdpOptions = {})
->DistributedDataParallel<typename Holder::ContainedType>;
template <typename M>
DistributedDataParallel(std::shared_ptr<M>, DdpOptions = {}) -> DistributedDataParallel<M>;
template <std::derived_from<torch::nn::Module> M>
DistributedDataParallel(const M&, DdpOptions = {}) -> DistributedDataParallel<M>;
template <typename Function>
DistributedDataParallel(NamedTensors, Function, DdpOptions = {})
    -> DistributedDataParallel<Function>;
template <typename Function>
DistributedDataParallel(NamedTensors, NamedTensors, Function, DdpOptions = {})
    -> DistributedDataParallel<Function>;
DistributedDataParallel(NamedTensors, DdpOptions = {})->DistributedDataParallel<detail::NoFunction>;

// torch::save and torch::load.
template <typename Archive, typename M>
requires std::same_as<Archive, torch::serialize::OutputArchive> Archive& operator<<(
    Archive& archive, const DistributedDataParallel<M>& /*model*/) {
  static_assert(sizeof(M) == 0,
                "a checkpoint is that of module(): torch::save(model.module(), path) on rank 0");
  return archive;
}
template <typename Archive, typename M>
requires std::same_as<Archive, torch::serialize::InputArchive> Archive& operator>>(
    Archive& archive, const DistributedDataParallel<M>& /*model*/) {
  static_assert(
      sizeof(M) == 0,
      "a checkpoint is that of module(): torch::load(module, path) before wrapping it, or "
      "on every rank");
  return archive;
}

}  // namespace paceline
