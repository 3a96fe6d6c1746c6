#pragma once

/// @file
/// Logical ranks: training that gives the same bits on any number of ranks.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include <paceline/api.h>

namespace paceline {
namespace detail {
class LogicalRanksCore;
}  // namespace detail

/// What a logical rank needs to continue on another rank, or in another job.
struct LogicalRankState {
  /// The state of the CPU's random number generator, as at::Generator::get_state gives it, followed
  /// by that of the model's device if it is another one.
  at::Tensor random;
  /// By name, what LogicalRanks::register_state added.
  std::map<std::string, at::Tensor> registered;
};

/// Consecutive logical ranks.
struct LogicalRange {
  int first = 0;  ///< The first of them.
  int count = 1;  ///< At least 1.

  /// Whether both are the same logical ranks.
  bool operator==(const LogicalRange&) const = default;
};

/// The logical ranks of a job. This rank runs a range of them; see DdpOptions::logical_ranks.
/// Without that option, each rank is one logical rank.
///
/// Iterate over it in each step, and train each logical rank on its share of the data:
///
///     for (const int rank : model.logical_ranks()) {
///       loss(model(batch_of(rank))).backward();
///     }
///     optimizer.step();
///
/// In the loop's body the logical rank is the current one:
///
/// - The default random number generators of the CPU and of the model's device are the logical
///   rank's own. Outside the loop, they are the process's.
/// - Buffers of the model are as before the loop. After the loop, all ranks have those that the
///   synchronised backward of logical rank 0 left; other changes are dropped. A loop without a
///   backward changes none. Outside the loop, change buffers on all ranks alike.
/// - `.grad` is as it was before the loop. To accumulate, run several backwards in the body. The
///   last of them is synchronised, all others must be under no_sync.
/// - Every logical rank must run one synchronised backward, or none of them may run any.
/// - Make no collective calls of the model's group: ranks may run different numbers of logical
///   ranks.
///
/// If an exception ends the loop before the backward of the last logical rank, random numbers and
/// buffers are as before the loop. The next loop then aborts the step, so that the other ranks
/// throw Mismatch, and zeroes the gradients that were defined before the loop. All ranks can repeat
/// the step, as a whole: after an exception in a backward, the next forward in the loop throws
/// UsageError. Do not leave the loop by break or return; if you did, the next loop throws
/// UsageError.
///
/// The begin of a loop and the backward of the last logical rank are collective. One loop at a time
/// may run in a process, since a process has one default random number generator.
class PACELINE_API LogicalRanks {
 public:
  /// Used by DistributedDataParallel::logical_ranks().
  explicit LogicalRanks(std::shared_ptr<detail::LogicalRanksCore> core);

  /// The end of a loop.
  struct Sentinel {};
  /// A loop, and its current logical rank. The loop ends with the iterator, if not before.
  class PACELINE_API Iterator {
   public:
    /// Used by begin().
    explicit Iterator(std::shared_ptr<detail::LogicalRanksCore> core);
    /// Takes over the loop of `other`, which cannot be used afterwards.
    Iterator(Iterator&& other) noexcept = default;
    Iterator& operator=(Iterator&&) = delete;
    ~Iterator();
    /// Its number, from 0 to total() - 1.
    int operator*() const;
    /// Goes on to the next. Throws what the communication at the end of the loop throws, and as the
    /// backward does if the logical ranks have not done the same.
    Iterator& operator++();
    /// Whether the loop is over.
    bool operator==(Sentinel) const;

   private:
    std::shared_ptr<detail::LogicalRanksCore> core_;
    std::uint64_t loop_;
    int exceptions_;  // under way when the loop began
  };
  /// Begins a loop over this rank's logical ranks, ascending.
  Iterator begin();
  /// The end of a loop.
  Sentinel end() const { return {}; }

  /// The number of logical ranks of the job.
  int total() const;
  /// The logical ranks that this rank runs.
  LogicalRange range() const;
  /// Gives this rank other logical ranks. All ranks call it between steps. Together they must run
  /// each logical rank once; otherwise all throw UsageError. States move along. If a function that
  /// register_state has cannot read a state, all ranks throw UsageError and nothing is changed; if
  /// one cannot take a state over, all throw it after the change. Makes new buckets, and each call
  /// uses some KiB until the group ends. Not with static_graph. Collective.
  void assign(const LogicalRange& range);

  /// The state of a logical rank that this rank runs; a copy. Throws UsageError for another one.
  LogicalRankState state(int rank) const;
  /// Sets it. Throws UsageError for another rank's, or if the registered names differ. A state may
  /// be that of a model on another device: then random numbers of this model's device, if that is
  /// not the CPU, go on as they are.
  void set_state(int rank, const LogicalRankState& state);
  /// Makes something part of each logical rank's state, under a name of its own: `get` returns it
  /// for a logical rank, and `set` takes back what `get` returned, maybe on another rank: in
  /// set_state, and in assign for a logical rank that this rank did not run. Register the same on
  /// all ranks. The model keeps copies of both functions.
  void register_state(const std::string& name, std::function<at::Tensor(int rank)> get,
                      std::function<void(int rank, const at::Tensor&)> set);
  /// Undoes it. Does nothing if the name is not registered.
  void unregister_state(const std::string& name);

 private:
  std::shared_ptr<detail::LogicalRanksCore> core_;
};

}  // namespace paceline
