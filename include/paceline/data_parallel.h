#pragma once

/// @file
/// DataParallel.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/ordered_dict.h>

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <paceline/api.h>
#include <paceline/apply_to_tensors.h>
#include <paceline/error.h>
#include <paceline/module_or_holder.h>

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace paceline {

/// Options of DataParallel. PyTorch's come first, in its order; then Paceline's own.
struct DataParallelOptions {
  /// A device for each replica. The module must be on the first one. Empty: all accelerators of the
  /// module's type; for a module on the CPU see num_replicas.
  std::vector<at::Device> device_ids{};
  /// The device of gathered outputs. Unset: that of the first replica.
  std::optional<at::Device> output_device{};
  /// The dimension along which inputs are scattered and outputs are gathered. A negative one counts
  /// from the last.
  std::int64_t dim = 0;

  /// The number of replicas of a module on the CPU; 0: at::get_num_threads(), but not more than the
  /// cores that this process may use. Not together with device_ids.
  int num_replicas = 0;
};

/// Times of DataParallel since construction.
struct DataParallelStats {
  /// All durations.
  using Duration = std::chrono::nanoseconds;
  /// What one replica has done.
  struct Replica {
    std::int64_t samples = 0;  ///< Its part of the inputs' sizes along DataParallelOptions::dim.
    Duration forward{};        ///< In forwards, or in functions of parallel_apply.
    Duration backward{};       ///< In backwards.
  };
  std::vector<Replica> replicas{};  ///< By replica.
  // These come on top of replica 0's work, on the thread that calls.
  Duration scatter{};  ///< Splitting inputs, and gradients of outputs; updating the replicas.
  Duration gather{};   ///< Concatenating outputs, and gradients of inputs.
  Duration sum{};      ///< Adding up gradients of parameters.
};

template <typename M>
class DataParallel;

namespace detail {
class DataParallelCore;

/// The part that does not depend on the module's type.
class PACELINE_API DataParallelHandle {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Factory = std::function<std::shared_ptr<torch::nn::Module>()>;
  // Calls the function in one replica with its parts of the tensors. Returns the output's tensors.
  using Call = std::function<Tensors(std::size_t replica, const Tensors& parts)>;

  DataParallelHandle(std::shared_ptr<torch::nn::Module> module, const DataParallelOptions& options);
  DataParallelHandle(const Factory& factory, const DataParallelOptions& options);
  DataParallelHandle(DataParallelHandle&&) noexcept;
  DataParallelHandle& operator=(DataParallelHandle&&) noexcept;
  ~DataParallelHandle();

  const std::shared_ptr<torch::nn::Module>& module() const;
  const std::vector<std::shared_ptr<torch::nn::Module>>& replicas() const;
  // Scatters the tensors, runs the call in at most `most` replicas, and gathers their outputs.
  Tensors run(const Tensors& tensors, std::size_t most, const Call& call);
  const DataParallelStats& stats() const;

 private:
  std::unique_ptr<DataParallelCore> core_;
};

/// Stands for the module's forward.
struct ForwardCall {
  template <typename M, typename... Args>
  auto operator()(M& module, Args&&... args) const
      -> decltype(module.forward(std::forward<Args>(args)...)) {
    return module.forward(std::forward<Args>(args)...);
  }
};

// How a replica keeps its part of an argument: a copy if it holds tensors, otherwise a reference to
// the caller's.
template <typename Arg>
using PartOf = std::conditional_t<
    std::is_same_v<std::remove_cvref_t<Arg>, at::TensorList>, std::vector<at::Tensor>,
    std::conditional_t<
        kHoldsTensors<std::remove_cvref_t<Arg>>, std::remove_cvref_t<Arg>,
        std::conditional_t<std::is_lvalue_reference_v<Arg>, Arg, const std::remove_cvref_t<Arg>&>>>;

template <typename Arg>
PartOf<Arg> whole_of(std::remove_reference_t<Arg>& arg) {
  if constexpr (std::is_same_v<std::remove_cvref_t<Arg>, at::TensorList>) {
    return arg.vec();
  } else {
    return arg;
  }
}

// A module's own clone(), since that of the base class throws.
template <typename M>
inline constexpr bool kIsCloneable =
    !std::is_same_v<decltype(&M::clone), decltype(&torch::nn::Module::clone)>;

// Not to be asked whether they can be called without arguments: that would compile the call.
template <typename T>
inline constexpr bool kIsDataParallel = false;
template <typename M>
inline constexpr bool kIsDataParallel<DataParallel<M>> = true;

template <typename T>
concept ModuleFactory = !kIsModuleOrHolder<T> && !kIsDataParallel<T> && std::invocable<T&>;

struct NoModule : torch::nn::Module {};
}  // namespace detail

/// Runs a module on parts of a batch at the same time: one process, several replicas of the module,
/// each on its thread. On the CPU each replica has its share of LibTorch's intra-op threads; on
/// accelerators each has a device. The result is that of the module on the whole batch, except for
/// layers such as BatchNorm and dropout. DistributedDataParallel, of several processes, is usually
/// faster. docs/from-pytorch.md has examples.
///
/// **Inputs and outputs.** A forward may have any signature. Tensors in arguments are split along
/// DataParallelOptions::dim as at::chunk does it; the first replicas get the chunks. Tensors may be
/// nested, see apply_to_tensors. All other arguments are handed to every replica by reference. If a
/// forward without arguments is called, only the first replica runs. Outputs are tensors, also
/// nested, and are concatenated along dim. Scalars become a vector of one element per replica, if
/// there are several. A forward must not change its inputs in place.
///
/// **Replicas** are copies made at construction, whose parameters share the memory of module()'s.
/// They follow module()'s values, types, requires_grad and training modes; other members stay as
/// they were copied. Before each forward, all but replica 0 get module()'s buffers. Replica 0
/// shares them and updates them; changes by other replicas are lost. So BatchNorm's running
/// statistics are those of the first chunk. On another device, values are copied before each
/// forward.
///
/// **Backward.** The gradient of a parameter is the sum over the replicas, in their order, so equal
/// inputs give equal bits. Hooks of module()'s parameters see that sum. Random operations on the
/// CPU share LibTorch's generator, so their numbers depend on timing.
///
/// **Errors.** If replicas throw, the first one's error is thrown once all have ended, as Error
/// that names the replica, with the original nested in it; UsageError stays UsageError. The next
/// forward works.
///
/// **Rules.**
/// - Use it on one thread at a time, and not within its own replicas. It is move-only, and not a
///   Module itself.
/// - The replicas must not share tensors that require gradients and are neither parameters of the
///   module nor arguments: UsageError.
/// - While it exists, the module must not gain or lose parameters, nor move to another device.
/// - Run backward on outputs, not within replicas. create_graph = true is not supported.
/// - Its threads end with it, or with the last output whose backward has not run.
///
/// It stands where the module's holder stood, as DistributedDataParallel does: `model->forward(x)`,
/// `model->train()` and `model->named_parameters()`. Reach everything else through module().
template <typename M>
class DataParallel {
  static_assert(
      std::derived_from<M, torch::nn::Module>,
      "DataParallel<M> needs the class of a torch::nn::Module; for a TORCH_MODULE that is "
      "the one whose name ends with Impl");

 public:
  /// Replicates a module by its clone(). Throws UsageError for a null module, for invalid options,
  /// and if clone() fails.
  explicit DataParallel(std::shared_ptr<M> module, const DataParallelOptions& options = {})
      : handle_(std::move(module), options), replicas_(of_type(handle_.replicas())) {
    static_assert(detail::kIsCloneable<M>,
                  "DataParallel copies its module by clone(): derive it from "
                  "torch::nn::Cloneable, or pass a function that makes one");
  }
  /// Replicates the module of a TORCH_MODULE's holder.
  explicit DataParallel(const torch::nn::ModuleHolder<M>& module,
                        const DataParallelOptions& options = {})
      : DataParallel(detail::module_of(module), options) {}
  /// For modules without clone(): calls the function, which returns a std::shared_ptr<M>, for
  /// module() and once more for each replica.
  template <detail::ModuleFactory Function>
  DataParallel(const Function& function, const DataParallelOptions& options)
      : handle_(factory_of(function), options), replicas_(of_type(handle_.replicas())) {}
  /// The same with a number of replicas on the CPU.
  template <detail::ModuleFactory Function>
  DataParallel(const Function& function, int num_replicas)
      : DataParallel(function, DataParallelOptions{.num_replicas = num_replicas}) {}
  /// Does not compile: a module is held by a pointer.
  template <std::derived_from<torch::nn::Module> Value>
  explicit DataParallel(const Value& /*module*/, const DataParallelOptions& options = {})
      : DataParallel(std::function<std::shared_ptr<M>()>(), options) {
    static_assert(!std::derived_from<Value, torch::nn::Module>,
                  "DataParallel shares its module: hold it by std::make_shared, or by a "
                  "TORCH_MODULE's holder, and pass that");
  }
  /// Does not compile: this is no module.
  template <typename Value>
  explicit DataParallel(const Value& /*value*/, const DataParallelOptions& options = {}) requires(
      !detail::ModuleFactory<Value> &&
      (std::same_as<M, detail::NoModule> || !std::derived_from<M, torch::nn::Module>))
      : DataParallel(std::function<std::shared_ptr<M>()>(), options) {
    static_assert(!std::same_as<M, detail::NoModule>,
                  "DataParallel replicates a torch::nn::Module in a std::shared_ptr or in a "
                  "TORCH_MODULE's holder, or a function that makes one in a std::shared_ptr");
  }

  /// The module's own forward, on all replicas. Throws UsageError if tensors of the arguments
  /// differ in size along dim or do not have that dimension, or if the replicas' outputs do not
  /// correspond.
  template <typename... Args>
  auto operator()(Args&&... args) {
    // As in PyTorch.
    const std::size_t most = sizeof...(Args) == 0 ? 1 : replicas_.size();
    return run(most, detail::ForwardCall(), std::forward<Args>(args)...);
  }
  /// As operator().
  template <typename... Args>
  auto forward(Args&&... args) {
    return (*this)(std::forward<Args>(args)...);
  }
  /// Runs `function(replica, parts of args...)` in every replica, where `replica` is an M&, and
  /// gathers what it returns. With the loss inside, less is left to do outside:
  ///
  ///     auto losses = model.parallel_apply(
  ///         [](Net& net, const at::Tensor& x, const at::Tensor& y) { return loss(net.forward(x),
  ///         y); }, x, y);
  ///
  /// Several threads call `function` at once. Throws as operator() does.
  template <typename Function, typename... Args>
  auto parallel_apply(Function&& function, Args&&... args) {
    return run(replicas_.size(), function, std::forward<Args>(args)...);
  }

  /// Times of the replicas. Read it between calls.
  const DataParallelStats& stats() const { return handle_.stats(); }

  /// The module, which is none of the replicas.
  std::shared_ptr<M> module() const { return std::static_pointer_cast<M>(handle_.module()); }
  /// Itself, so that programs may go on to write `model->forward(x)`.
  DataParallel* operator->() { return this; }
  /// Itself.
  const DataParallel* operator->() const { return this; }
  /// The parameters of the module.
  std::vector<at::Tensor> parameters() const { return handle_.module()->parameters(); }
  /// With the names that they have in the module.
  torch::OrderedDict<std::string, at::Tensor> named_parameters() const {
    return handle_.module()->named_parameters();
  }
  /// The buffers of the module.
  std::vector<at::Tensor> buffers() const { return handle_.module()->buffers(); }
  /// With the names that they have in the module.
  torch::OrderedDict<std::string, at::Tensor> named_buffers() const {
    return handle_.module()->named_buffers();
  }
  /// Drops all gradients, or sets them to zero.
  void zero_grad(bool set_to_none = true) { handle_.module()->zero_grad(set_to_none); }
  /// Sets the module's training mode.
  void train(bool on = true) { handle_.module()->train(on); }
  /// Ends the module's training mode.
  void eval() { train(false); }
  /// Whether the module is in training mode.
  bool is_training() const { return handle_.module()->is_training(); }

 private:
  template <typename Function>
  static detail::DataParallelHandle::Factory factory_of(const Function& function) {
    constexpr bool kMakesModules =
        std::is_convertible_v<std::invoke_result_t<Function&>, std::shared_ptr<M>>;
    static_assert(kMakesModules,
                  "DataParallel<M> needs a function that returns std::shared_ptr<M>, such as "
                  "std::make_shared makes it");
    if constexpr (kMakesModules) return function;
    return {};
  }

  static std::vector<M*> of_type(const std::vector<std::shared_ptr<torch::nn::Module>>& modules) {
    std::vector<M*> replicas;
    for (const auto& module : modules) {
      replicas.push_back(dynamic_cast<M*>(module.get()));
      if (replicas.back() == nullptr) {
        throw UsageError(
            "DataParallel: clone() of the module returns a module of another class, such as a base "
            "class; pass a function that makes one");
      }
    }
    return replicas;
  }

  template <typename Function, typename... Args>
  auto run(std::size_t most, Function&& function, Args&&... args) {
    constexpr bool kIsCallable = std::is_invocable_v<Function&, M&, detail::PartOf<Args>&...>;
    static_assert(kIsCallable,
                  "the forward of this module, or the function passed to parallel_apply after its "
                  "module, does not take these arguments");
    if constexpr (kIsCallable) {
      const std::tuple<detail::PartOf<Args>...> whole{detail::whole_of<Args>(args)...};
      return gather(most, detail::tensors_of(whole), [&](std::size_t replica, const auto& tensors) {
        auto parts = whole;
        detail::replace_tensors(parts, tensors);
        return std::apply(
            [&](auto&... part) { return std::invoke(function, *replicas_[replica], part...); },
            parts);
      });
    }
  }

  template <typename Call>
  auto gather(std::size_t most, const std::vector<at::Tensor>& inputs, Call call) {
    using Output = std::invoke_result_t<Call&, std::size_t, const std::vector<at::Tensor>&>;
    if constexpr (std::is_void_v<Output>) {
      handle_.run(inputs, most, [&](std::size_t replica, const auto& tensors) {
        call(replica, tensors);
        return std::vector<at::Tensor>();
      });
    } else {
      constexpr detail::LeafTypes kTypes = detail::leaf_types<Output>();
      static_assert(
          kTypes.tensors && !kTypes.others,
          "DataParallel gathers tensors: this forward or function returns something else; "
          "return tensors, also nested, or a struct with apply_to_tensors (see "
          "paceline/apply_to_tensors.h)");
      std::vector<std::optional<Output>> outputs(most);
      const auto gathered =
          handle_.run(inputs, most, [&](std::size_t replica, const auto& tensors) {
            return detail::tensors_of(outputs[replica].emplace(call(replica, tensors)));
          });
      for (std::size_t i = 1; i < most && outputs[i]; ++i) {
        if (detail::is_same_nest(*outputs[0], *outputs[i])) continue;
        throw UsageError("DataParallel: the outputs of replicas 0 and " + std::to_string(i) +
                         " are nested differently");
      }
      detail::replace_tensors(*outputs[0], gathered);
      return *std::move(outputs[0]);
    }
  }

  detail::DataParallelHandle handle_;
  std::vector<M*> replicas_;
};

/// From a TORCH_MODULE's holder.
template <typename Holder>
requires std::derived_from<typename Holder::ContainedType, torch::nn::Module> DataParallel(
    Holder, DataParallelOptions = {})
->DataParallel<typename Holder::ContainedType>;
/// From a shared pointer.
template <std::derived_from<torch::nn::Module> M>
DataParallel(std::shared_ptr<M>, DataParallelOptions = {}) -> DataParallel<M>;
/// From a function that makes a module in a shared pointer.
template <detail::ModuleFactory Function>
DataParallel(Function, DataParallelOptions)
    -> DataParallel<typename std::invoke_result_t<Function&>::element_type>;
/// The same with a number of replicas.
template <detail::ModuleFactory Function>
DataParallel(Function, int) -> DataParallel<typename std::invoke_result_t<Function&>::element_type>;
/// Does not compile: a module is held by a pointer.
template <std::derived_from<torch::nn::Module> M>
DataParallel(const M&, DataParallelOptions = {}) -> DataParallel<M>;
/// Does not compile: this is no module.
template <typename T>
requires(!detail::kIsModuleOrHolder<T> && !detail::ModuleFactory<T>)
    DataParallel(const T&, DataParallelOptions = {})
->DataParallel<detail::NoModule>;

/// torch::save; does not compile: save module() instead.
template <typename Archive, typename M>
requires std::same_as<Archive, torch::serialize::OutputArchive> Archive& operator<<(
    Archive& archive, const DataParallel<M>& /*model*/) {
  static_assert(sizeof(M) == 0,
                "DataParallel cannot be saved, but its module can: torch::save(model.module(), "
                "path)");
  return archive;
}
/// torch::load; does not compile: load the module instead.
template <typename Archive, typename M>
requires std::same_as<Archive, torch::serialize::InputArchive> Archive& operator>>(
    Archive& archive, const DataParallel<M>& /*model*/) {
  static_assert(sizeof(M) == 0,
                "DataParallel cannot be loaded, but its module can: auto module = model.module(); "
                "torch::load(module, path)");
  return archive;
}

}  // namespace paceline
