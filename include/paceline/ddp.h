#pragma once

/// @file
/// DistributedDataParallel.

#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/ordered_dict.h>

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
#include <paceline/ddp_options.h>
#include <paceline/ddp_stats.h>
#include <paceline/distributed.h>
#include <paceline/for_each_tensor.h>
#include <paceline/join.h>
#include <paceline/logical_ranks.h>
#include <paceline/module_or_holder.h>
#include <paceline/named_tensors.h>

namespace paceline {

namespace detail {
class DdpCore;

/// The part that does not depend on the model's type.
class PACELINE_API DdpHandle {
 public:
  DdpHandle(torch::nn::Module& module, const DdpOptions& options);
  DdpHandle(const torch::jit::Module& module, const DdpOptions& options);
  DdpHandle(const NamedTensors& parameters, const NamedTensors& buffers, const DdpOptions& options);
  DdpHandle(DdpHandle&&) noexcept;
  DdpHandle& operator=(DdpHandle&&) noexcept;
  ~DdpHandle();

  void before_forward();
  void after_forward();
  // The device to which arguments of a forward are copied; unset: they are not.
  std::optional<at::Device> input_device() const;
  bool watches_outputs() const;
  void watch_output(const at::Tensor& output);
  std::shared_ptr<int> no_sync_guards() const;
  void set_samples(double count);
  at::Tensor average_loss(const at::Tensor& loss) const;
  void register_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook);
  Joinable& joinable() const;
  const std::shared_ptr<LogicalRanksCore>& logical_ranks() const;
  const DdpStats& stats() const;
  torch::OrderedDict<std::string, at::Tensor> named_parameters() const;
  torch::OrderedDict<std::string, at::Tensor> named_buffers() const;
  void zero_grad(bool set_to_none);
  bool is_training() const;

 private:
  DdpCore& core() const;  // throws UsageError if this object was moved from

  std::unique_ptr<DdpCore> core_;
};

// An argument of a forward on `device`, if it is a tensor, or an optional or a vector of tensors;
// another one as it is.
inline at::Tensor moved(const at::Tensor& tensor, at::Device device) {
  return tensor.defined() ? tensor.to(device, /*non_blocking=*/true) : tensor;
}
inline std::optional<at::Tensor> moved(std::optional<at::Tensor> tensor, at::Device device) {
  if (tensor) tensor = moved(*tensor, device);
  return tensor;
}
inline std::vector<at::Tensor> moved(std::vector<at::Tensor> tensors, at::Device device) {
  for (at::Tensor& tensor : tensors) tensor = moved(tensor, device);
  return tensors;
}
template <typename Value>
inline constexpr bool kIsMoved =
    std::is_same_v<Value, at::Tensor> || std::is_same_v<Value, std::optional<at::Tensor>> ||
    std::is_same_v<Value, std::vector<at::Tensor>>;
template <typename Argument>
using OnDevice = std::conditional_t<kIsMoved<std::remove_cvref_t<Argument>>,
                                    std::remove_cvref_t<Argument>, Argument&&>;
template <typename Argument>
OnDevice<Argument> on_device(Argument&& argument, at::Device device) {
  if constexpr (kIsMoved<std::remove_cvref_t<Argument>>) {
    return moved(std::forward<Argument>(argument), device);
  } else {
    return std::forward<Argument>(argument);
  }
}

/// Stands in for the module of a model of named tensors.
template <typename Function>
class TensorFunction {
 public:
  explicit TensorFunction(Function function) : function_(std::move(function)) {}
  template <typename... Args>
  decltype(auto) forward(Args&&... args) {
    constexpr bool kIsCallable = std::is_invocable_v<Function&, Args...>;
    static_assert(kIsCallable,
                  "the function passed to DistributedDataParallel as the model's forward does not "
                  "take these arguments");
    if constexpr (kIsCallable) return std::invoke(function_, std::forward<Args>(args)...);
  }

 private:
  Function function_;
};

struct NoModel {};
}  // namespace detail

/// While it lives, forwards of its DistributedDataParallel are not synchronised: in their
/// backwards, gradients accumulate on each rank alone. Between synchronised steps, all ranks must
/// run the same number of such backwards, unless they use Average::samples. Forwards without a
/// backward do not count. Move-only; several may live at once, and end in any order.
class [[nodiscard]] NoSyncGuard {
 public:
  /// Used by DistributedDataParallel::no_sync(), which counts its guards in `guards`.
  explicit NoSyncGuard(std::shared_ptr<int> guards, bool enabled)
      : guards_(enabled ? std::move(guards) : nullptr) {
    if (guards_) ++*guards_;
  }
  /// Leaves `other` without effect.
  NoSyncGuard(NoSyncGuard&& other) noexcept = default;
  NoSyncGuard& operator=(NoSyncGuard&&) = delete;
  ~NoSyncGuard() {
    if (guards_) --*guards_;
  }

 private:
  std::shared_ptr<int> guards_;
};

/// Wraps a module so that every backward leaves the average of all ranks' gradients, or their sum
/// (see Average), in its parameters. Gradients are reduced bucket by bucket while the backward
/// still runs (Li et al., "PyTorch Distributed", VLDB 2020). In a world of one, it makes the same
/// checks as on several ranks, and gradients stay where autograd puts them. docs/from-pytorch.md
/// has examples, and shows how to save, load, freeze and evaluate a model, and to use LBFGS.
///
/// **Construction** is collective. Parameters and buffers become rank 0's. If the ranks' parameters
/// or buffers differ in number, name, shape, strides or type, all ranks throw Mismatch that names
/// the first difference.
///
/// **Steps.** The last forward before a backward decides whether the backward is synchronised: it
/// is unless that forward ran under no_sync. After a synchronised backward, .grad of each parameter
/// is a view into its bucket (see gradient_as_bucket_view). The next backward adds to it in place,
/// as always: clone a gradient to keep it.
///
/// **Errors.** A backward throws PeerLost, Timeout or Mismatch when another rank fails, and over
/// gloo Error; Mismatch when the ranks have not done the same (docs/errors.md, Divergence); and
/// Mismatch for parameters that got no gradient (see find_unused_parameters), over gloo Error.
/// docs/errors.md says after which errors the next forward can go on; all gradients are zero then.
///
/// **Rules.**
/// - Use it on one thread at a time. It is move-only, and not a Module itself.
/// - While it exists, the module must not gain or lose parameters, nor move to another type or
///   device. A parameter has at most one wrapper at a time.
/// - Freeze parameters after construction on all ranks alike. Parameters that are frozen at
///   construction must stay frozen.
/// - If one backward runs through several models, run their forwards in one order on all ranks.
/// - Forwards and backwards may make collective calls of the group (docs/threading.md).
///
/// It stands where the module's holder stood: `model->forward(x)`, `model->train()` and
/// `model->named_parameters()` are the wrapper's own members of these names. Reach everything else
/// through module().
///
/// **TorchScript.** A torch::jit::Module is wrapped like any other, and shared: forward takes its
/// arguments one by one or in a vector, and returns an IValue.
///
/// **Other models.** To wrap a model that is not a module, pass its parameters and its forward:
///
///     DistributedDataParallel model({{"w", w}, {"b", b}},
///                                   [&](at::Tensor x) { return x.mm(w) + b; });
///
/// M is then the function's type. A member of a class needs a type with a name, such as
/// DistributedDataParallel<std::function<at::Tensor(at::Tensor)>>. Every forward with grad mode on
/// counts as a forward in training mode. Sparse gradients become dense. If a tensor has two names,
/// errors use the first.
template <typename M>
class DistributedDataParallel {
  static constexpr bool kIsScript = std::same_as<M, torch::jit::Module>;
  static constexpr bool kIsModule = kIsScript || std::derived_from<M, torch::nn::Module>;
  static_assert(kIsModule || !detail::kIsModuleOrHolder<M>,
                "M is the module's class: DistributedDataParallel<NetImpl>, if Net is a "
                "TORCH_MODULE, or a shared pointer to NetImpl");
  using Model = std::conditional_t<kIsModule, M, detail::TensorFunction<M>>;
  using Function = std::conditional_t<kIsModule, detail::NoModel, M>;

 public:
  /// Wraps a module that others may hold too. Collective. Throws UsageError for a null module.
  explicit DistributedDataParallel(
      std::shared_ptr<M> module,
      const DdpOptions& options = {}) requires std::derived_from<M, torch::nn::Module>
      : module_(std::move(module)),
        handle_(detail::checked_module(module_, "DistributedDataParallel"), options) {}
  /// Wraps the module of a TORCH_MODULE's holder. Collective.
  explicit DistributedDataParallel(
      const torch::nn::ModuleHolder<M>& module,
      const DdpOptions& options = {}) requires std::derived_from<M, torch::nn::Module>
      : DistributedDataParallel(detail::module_of(module), options) {}
  /// Wraps a TorchScript module. Copies of it share its tensors. Collective.
  explicit DistributedDataParallel(const torch::jit::Module& script,
                                   const DdpOptions& options = {}) requires kIsScript
      : module_(std::make_shared<Model>(script)),
        handle_(*module_, options) {}
  /// Wraps a model of named tensors. Collective. Throws UsageError for an undefined tensor, or if
  /// two tensors have one name.
  DistributedDataParallel(const NamedTensors& parameters, Function forward,
                          const DdpOptions& options = {})
      : DistributedDataParallel(parameters, {}, std::move(forward), options) {}
  /// The same with `buffers`: tensors that are not trained and are copied from rank 0, see
  /// broadcast_buffers.
  DistributedDataParallel(const NamedTensors& parameters, const NamedTensors& buffers,
                          Function forward, const DdpOptions& options = {})
      : module_(std::make_shared<Model>(std::move(forward))),
        handle_(parameters, buffers, options) {}
  /// Does not compile: the forward is missing.
  explicit DistributedDataParallel(
      const NamedTensors& parameters,
      const DdpOptions& options = {}) requires std::same_as<M, detail::NoModel>
      : DistributedDataParallel(parameters, Function(), options) {
    static_assert(!std::same_as<M, detail::NoModel>,
                  "DistributedDataParallel of named tensors needs the model's forward after them, "
                  "a function");
  }
  /// Does not compile: this is no model.
  template <typename Value>
  explicit DistributedDataParallel(const Value& /*value*/, const DdpOptions& options = {}) requires
      std::same_as<M, detail::NoModel>
      : DistributedDataParallel(NamedTensors(), Function(), options) {
    static_assert(!std::same_as<M, detail::NoModel>,
                  "DistributedDataParallel wraps a torch::nn::Module in a std::shared_ptr or in a "
                  "TORCH_MODULE's holder, a torch::jit::Module, or named tensors with a function");
  }
  /// Does not compile: a module is held by a pointer.
  template <std::derived_from<torch::nn::Module> Value>
  explicit DistributedDataParallel(const Value& /*module*/, const DdpOptions& options = {})
      : DistributedDataParallel(std::shared_ptr<M>(), options) {
    static_assert(!std::derived_from<Value, torch::nn::Module>,
                  "DistributedDataParallel shares its module: hold it by std::make_shared, or by a "
                  "TORCH_MODULE's holder, and pass that");
  }

  /// The module's own forward, of any signature.
  template <typename... Args>
  decltype(auto) operator()(Args&&... args) {
    if constexpr (kIsScript) {
      return (*this)(std::vector<c10::IValue>{std::forward<Args>(args)...});
    } else {
      if constexpr (takes<detail::OnDevice<Args>...>()) {
        if (const auto device = handle_.input_device()) {
          return run([&]() -> decltype(auto) {
            return module_->forward(detail::on_device(std::forward<Args>(args), *device)...);
          });
        }
      }
      return run([&]() -> decltype(auto) { return module_->forward(std::forward<Args>(args)...); });
    }
  }
  /// The forward of a TorchScript module.
  c10::IValue operator()(std::vector<c10::IValue> inputs) requires kIsScript {
    if (const auto device = handle_.input_device()) {
      for (c10::IValue& input : inputs) {
        if (input.isTensor()) input = detail::moved(input.toTensor(), *device);
      }
    }
    return run([&] { return module_->forward(std::move(inputs)); });
  }
  /// As operator().
  template <typename... Args>
  decltype(auto) forward(Args&&... args) {
    return (*this)(std::forward<Args>(args)...);
  }
  /// As operator().
  c10::IValue forward(std::vector<c10::IValue> inputs) requires kIsScript {
    return (*this)(std::move(inputs));
  }

  /// While the guard lives, forwards are not synchronised, unless `enabled` is false:
  /// `auto guard = model.no_sync(micro + 1 < accumulation);`
  NoSyncGuard no_sync(bool enabled = true) {
    return NoSyncGuard(handle_.no_sync_guards(), enabled);
  }

  /// The logical ranks that this rank runs; iterate over them in every step.
  LogicalRanks logical_ranks() { return LogicalRanks(handle_.logical_ranks()); }

  /// With Average::samples, call it before every synchronised backward. `count` is the number of
  /// samples, or tokens, whose mean is this rank's loss, with those of preceding backwards under
  /// no_sync. Not negative; with 0 this rank's gradients have no effect.
  void set_samples(double count) { handle_.set_samples(count); }

  /// The average of the ranks' losses, one element each, as that of the gradients: with
  /// Average::samples it has the weights of set_samples, and with Average::sum it is the sum. Equal
  /// on all ranks, and requires no gradient. Collective. Throws UsageError for another shape, and
  /// with logical ranks.
  at::Tensor average_loss(const at::Tensor& loss) const { return handle_.average_loss(loss); }

  /// Makes `hook` communicate every bucket from now on. Collective; at most once, before the first
  /// backward. Throws UsageError with Average::samples and Average::sum, since a hook averages by
  /// itself.
  void register_comm_hook(CommHook hook) {
    handle_.register_comm_hook(detail::make_comm_hook(std::move(hook)));
  }
  /// The same with a hook in the form that C++ extensions of PyTorch use.
  void register_comm_hook(std::shared_ptr<c10d::CommHookInterface> hook) {
    handle_.register_comm_hook(std::move(hook));
  }

  /// Runs a training loop over inputs that may be uneven; see paceline::join().
  void join(const std::function<void()>& body, const JoinOptions& options = {}) {
    paceline::join({*this}, body, options);
  }
  /// For paceline::join.
  operator Joinable&() const { return handle_.joinable(); }

  /// Statistics of the synchronised steps.
  const DdpStats& stats() const { return handle_.stats(); }

  /// The wrapped module.
  const std::shared_ptr<Model>& module() const {
    static_assert(kIsModule, "a DistributedDataParallel of named tensors has no module()");
    return module_;
  }
  /// Itself, so that programs may go on to write `model->forward(x)`.
  DistributedDataParallel* operator->() { return this; }
  /// Itself.
  const DistributedDataParallel* operator->() const { return this; }
  /// The parameters of the module, or those given.
  std::vector<at::Tensor> parameters() const { return handle_.named_parameters().values(); }
  /// With the names that they have in the module.
  torch::OrderedDict<std::string, at::Tensor> named_parameters() const {
    return handle_.named_parameters();
  }
  /// The buffers of the module, or those given.
  std::vector<at::Tensor> buffers() const { return handle_.named_buffers().values(); }
  /// With the names that they have in the module.
  torch::OrderedDict<std::string, at::Tensor> named_buffers() const {
    return handle_.named_buffers();
  }
  /// Drops all gradients, or sets them to zero.
  void zero_grad(bool set_to_none = true) { handle_.zero_grad(set_to_none); }
  /// Sets the module's training mode.
  void train(bool on = true) {
    static_assert(kIsModule,
                  "a DistributedDataParallel of named tensors has no modes: evaluate under "
                  "torch::NoGradGuard");
    if constexpr (kIsModule) module_->train(on);
  }
  /// Ends the module's training mode.
  void eval() { train(false); }
  /// Whether the module is in training mode.
  bool is_training() const { return handle_.is_training(); }
  /// Does not compile: the buckets fit the parameters as they were.
  template <typename... Args>
  void to(const Args&... /*args*/) const {
    static_assert(sizeof(M) == 0,
                  "a DistributedDataParallel cannot move to another device or type: move the "
                  "module, then wrap it");
  }

 private:
  // Whether the forward takes arguments of these types.
  template <typename... Args>
  static constexpr bool takes() {
    if constexpr (kIsModule) {
      return requires(Model & model, Args && ... args) {
        model.forward(std::forward<Args>(args)...);
      };
    } else {
      return std::is_invocable_v<Function&, Args...>;
    }
  }

  template <typename Forward>
  std::invoke_result_t<Forward&> run(Forward forward) {
    using Output = std::invoke_result_t<Forward&>;
    handle_.before_forward();
    if constexpr (std::is_void_v<Output>) {
      forward();
      handle_.after_forward();
    } else {
      Output output = forward();
      handle_.after_forward();
      if (handle_.watches_outputs()) {
        for_each_tensor(output, [&](const at::Tensor& t) { handle_.watch_output(t); });
      }
      return output;
    }
  }

  std::shared_ptr<Model> module_;
  detail::DdpHandle handle_;
};

/// From a TORCH_MODULE's holder.
template <typename Holder>
requires std::derived_from<typename Holder::ContainedType, torch::nn::Module>
DistributedDataParallel(Holder, DdpOptions = {})
->DistributedDataParallel<typename Holder::ContainedType>;
/// From a shared pointer.
template <std::derived_from<torch::nn::Module> M>
DistributedDataParallel(std::shared_ptr<M>, DdpOptions = {}) -> DistributedDataParallel<M>;
/// Does not compile: a module is held by a pointer.
template <std::derived_from<torch::nn::Module> M>
DistributedDataParallel(const M&, DdpOptions = {}) -> DistributedDataParallel<M>;
/// Does not compile: this is no model.
template <typename T>
requires(!detail::kIsModuleOrHolder<T>) DistributedDataParallel(const T&, DdpOptions = {})
->DistributedDataParallel<detail::NoModel>;
/// From a TorchScript module.
DistributedDataParallel(torch::jit::Module, DdpOptions = {})
    ->DistributedDataParallel<torch::jit::Module>;
/// From named tensors.
template <typename Function>
DistributedDataParallel(NamedTensors, Function, DdpOptions = {})
    -> DistributedDataParallel<Function>;
/// From named tensors and buffers.
template <typename Function>
DistributedDataParallel(NamedTensors, NamedTensors, Function, DdpOptions = {})
    -> DistributedDataParallel<Function>;
/// Does not compile: the forward is missing.
DistributedDataParallel(NamedTensors, DdpOptions = {})->DistributedDataParallel<detail::NoModel>;

/// A closure for an optimizer that calls it as often as the loss decides, such as LBFGS with a line
/// search:
///
///     optimizer.step(paceline::closure(model, [&] {
///       optimizer.zero_grad();
///       auto loss = ...model(x)...;
///       loss.backward();
///       return loss;
///     }));
///
/// It returns the average of the losses that `function` returns, so that the optimizers of all
/// ranks decide alike. If ranks call it different numbers of times, they throw Mismatch. `model`
/// must outlive it. See DistributedDataParallel::average_loss.
template <typename M, std::invocable Function>
[[nodiscard]] std::function<at::Tensor()> closure(DistributedDataParallel<M>& model,
                                                  Function function) {
  return
      [&model, function = std::move(function)]() mutable { return model.average_loss(function()); };
}

/// torch::save; does not compile: save module() instead.
template <typename Archive, typename M>
requires std::same_as<Archive, torch::serialize::OutputArchive> Archive& operator<<(
    Archive& archive, const DistributedDataParallel<M>& /*model*/) {
  static_assert(sizeof(M) == 0,
                "DistributedDataParallel cannot be saved, but its module can: "
                "torch::save(model.module(), path) on rank 0");
  return archive;
}
/// torch::load; does not compile: load the module instead.
template <typename Archive, typename M>
requires std::same_as<Archive, torch::serialize::InputArchive> Archive& operator>>(
    Archive& archive, const DistributedDataParallel<M>& /*model*/) {
  static_assert(sizeof(M) == 0,
                "DistributedDataParallel cannot be loaded, but its module can: torch::load(module, "
                "path) before wrapping it, or on every rank");
  return archive;
}

}  // namespace paceline
