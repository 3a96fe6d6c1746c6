#pragma once

/// @file
/// Checkpoints of a training run: all that it needs to go on as if it had not stopped.

#include <ATen/core/ivalue.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <paceline/api.h>
#include <paceline/checkpoint.h>
#include <paceline/ddp.h>
#include <paceline/distributed.h>
#include <paceline/logical_ranks.h>
#include <paceline/module_or_holder.h>

namespace paceline {

/// Something with a state, to which this object refers: it must not outlive it.
class PACELINE_API Stateful {
 public:
  /// How the ranks hold the state.
  enum class Scope {
    shared,        ///< All ranks have the same: rank 0 saves it, and all load it.
    rank,          ///< Each rank has its own.
    logical_ranks  ///< A dict by logical rank; a rank loads its own out of all.
  };
  /// Returns the state. Must make no collective calls: of a shared state, only rank 0 calls it.
  using Get = std::function<at::IValue()>;
  /// Takes back what Get returned. Must make no collective calls.
  using Set = std::function<void(const at::IValue&)>;

  /// A state of any kind that pickle_save takes.
  Stateful(Get get, Set set, Scope scope = Scope::shared)
      : get_(std::move(get)), set_(std::move(set)), scope_(scope) {}
  /// The parameters and buffers.
  Stateful(torch::nn::Module& module);
  /// The same. Throws UsageError for a null module.
  template <typename M>
  Stateful(const torch::nn::ModuleHolder<M>& holder)
      : Stateful(detail::checked_module(detail::module_of(holder), "Stateful")) {}
  /// The same of the wrapped module.
  template <std::derived_from<torch::nn::Module> M>
  Stateful(const DistributedDataParallel<M>& model) : Stateful(*model.module()) {}
  /// See state_dict(const torch::optim::Optimizer&).
  Stateful(torch::optim::Optimizer& optimizer);
  /// The states of the logical ranks that this rank runs. Another number of ranks may load them.
  /// Throws UsageError if DdpOptions::logical_ranks is not set.
  Stateful(LogicalRanks ranks);
  /// The elements of a tensor. A load converts their type as an operation in place would: from
  /// float64 to float32, but not from floating point numbers to integers.
  Stateful(at::Tensor& tensor);
  /// A number.
  template <typename Number>
  Stateful(Number& number) requires std::is_arithmetic_v<Number>
      : Stateful([&number] { return value_of_number(number); },
                 [&number](const at::IValue& value) { set(number, value); }) {}
  /// An object with members `at::IValue state_dict()` and `load_state_dict(const at::IValue&)`,
  /// such as data::DataLoader.
  template <typename Object>
  Stateful(Object& object) requires requires(const at::IValue& value) {
    { object.state_dict() } -> std::convertible_to<at::IValue>;
    object.load_state_dict(value);
  } : Stateful([&object]() -> at::IValue { return object.state_dict(); },
               [&object](const at::IValue& value) { object.load_state_dict(value); }) {
  }

  /// The same state, of each rank by itself.
  Stateful per_rank() const { return {get_, set_, Scope::rank}; }

  at::IValue state_dict() const { return get_(); }                      ///< The state.
  void load_state_dict(const at::IValue& value) const { set_(value); }  ///< Sets it.
  Scope scope() const { return scope_; }                                ///< Whose it is.

 private:
  [[noreturn]] static void throw_other_type(const at::IValue& value);
  template <typename Number>
  static at::IValue value_of_number(Number number) {
    if constexpr (std::is_same_v<Number, bool>) {
      return number;
    } else if constexpr (std::is_floating_point_v<Number>) {
      return static_cast<double>(number);
    } else {
      return static_cast<std::int64_t>(number);
    }
  }
  template <typename Number>
  static void set(Number& number, const at::IValue& value) {
    const bool fits = std::is_same_v<Number, bool>       ? value.isBool()
                      : std::is_floating_point_v<Number> ? value.isDouble()
                                                         : value.isInt();
    if (!fits) throw_other_type(value);
    if constexpr (std::is_same_v<Number, bool>) {
      number = value.toBool();
    } else if constexpr (std::is_floating_point_v<Number>) {
      number = static_cast<Number>(value.toDouble());
    } else {
      // The larger ones of 64 bits are stored as negative numbers.
      constexpr bool kTakesAll =
          std::is_unsigned_v<Number> && sizeof(Number) == sizeof(std::int64_t);
      const std::int64_t integer = value.toInt();
      const auto converted = static_cast<Number>(integer);
      if (!kTakesAll && static_cast<std::int64_t>(converted) != integer) throw_other_type(value);
      number = converted;
    }
  }

  Get get_;
  Set set_;
  Scope scope_;
};

/// What a checkpoint contains, by name.
using States = std::vector<std::pair<std::string, Stateful>>;

/// Options of CheckpointDirectory. The same on all ranks.
struct CheckpointOptions {
  /// How many of the newest checkpoints are kept; 0: all. Checkpoints of later steps than the one
  /// being saved, for example of an earlier run, are not counted, and stay.
  int keep_last = 0;
  /// How many with the best metric are kept as well; they may be among the newest. Only with
  /// keep_last.
  int keep_best = 0;
  /// Whether a lower metric is better, as of a loss.
  bool lower_is_better = false;
  /// Whether save returns once the state is copied, and a thread writes it.
  bool asynchronous = false;
  /// Whether save waits until files are on the disk. If not, a checkpoint survives the end of the
  /// process, but maybe not that of the machine.
  bool fsync = true;
  ProcessGroup group{};  ///< The ranks that save together.
};

/// A checkpoint that resume has loaded.
struct ResumedCheckpoint {
  std::int64_t step = 0;         ///< What save was given.
  std::filesystem::path path{};  ///< Its directory.
  /// A line for the user. It also names damaged ones, and says if ranks have other numbers of
  /// threads or another instruction set than when they saved, since last bits depend on these.
  std::string message{};
};

/// A directory with the checkpoints of a training run, which all ranks must see:
///
///     const paceline::States states{{"model", model}, {"optimizer", optimizer}, {"loader",
///     loader},
///                                   {"step", step}};
///     paceline::CheckpointDirectory checkpoints("runs/1", {.keep_last = 3});
///     if (const auto resumed = checkpoints.resume(states)) std::puts(resumed->message.c_str());
///     for (auto epoch = loader.epoch(); epoch < epochs; ++epoch) {
///       for (auto& [x, y] : loader.epoch(epoch)) {
///         ...
///         if (++step % 100 == 0) checkpoints.save(step, states);
///
/// A checkpoint also has the state of each rank's default random number generator of the CPU. So
/// training goes on with the same bits, over the backend paceline at the same number of ranks; with
/// LogicalRanks among the states, over any backend at any number. Otherwise, another number of
/// ranks goes on with the samples that are left, and with random numbers of its own on the ranks
/// that are new.
///
/// Checkpoints are directories step-000000000100, with state.pt of rank 0, and rank-0.pt, ... of
/// each rank by itself, all readable by pickle_load and by Python's torch.load; and rank-0.json,
/// ..., with the files' sizes and checksums. A checkpoint gets its name when it is complete. If the
/// job ends before, it is found nevertheless if it is complete, and is removed by the next save
/// otherwise.
///
/// All members but the destructor are collective over the group, and throw on all ranks if one of
/// them fails: Error that names the rank and the cause. One object of one job at a time may use a
/// directory. Use it on one thread at a time. In another world, or after paceline::reconfigure,
/// construct it anew: members throw UsageError.
class PACELINE_API CheckpointDirectory {
 public:
  /// Makes the directory if needed. Throws Error if that fails, or for a negative option.
  explicit CheckpointDirectory(std::filesystem::path directory,
                               const CheckpointOptions& options = {});
  /// `other` may only be assigned to or destroyed afterwards.
  CheckpointDirectory(CheckpointDirectory&& other) noexcept;
  /// The same. Waits as the destructor does.
  CheckpointDirectory& operator=(CheckpointDirectory&& other) noexcept;
  /// Waits for the thread of an asynchronous save. Not collective: resume gives that checkpoint its
  /// name, if wait did not.
  ~CheckpointDirectory();

  /// Saves the states, as of `step`, which must not be negative; an earlier checkpoint of the same
  /// step is replaced. `metric`, that of rank 0, is what keep_best compares; one that is not finite
  /// counts as none. The name "random state" is in use.
  ///
  /// A rank that does not see what the others have written throws: the directory is not shared. If
  /// an older checkpoint cannot be removed, that is logged as a warning.
  ///
  /// With CheckpointOptions::asynchronous, first waits for the previous save, and returns once the
  /// state is copied. If the previous save failed, it throws that then. Tensors that share memory
  /// are copied separately.
  void save(std::int64_t step, const States& states, std::optional<double> metric = std::nullopt);
  /// Returns when an asynchronous save is complete.
  void wait();

  /// Loads the newest checkpoint that is complete and undamaged; nullopt if there is none at all.
  /// Throws Error if there are some, and all are damaged; if a file of it cannot be read, as
  /// without the permission; or if a state that is asked for is missing or does not fit, after
  /// which states may be loaded in part.
  std::optional<ResumedCheckpoint> resume(const States& states);

 private:
  class [[gnu::visibility("hidden")]] Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace paceline
