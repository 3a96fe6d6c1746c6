#pragma once

/// @file
/// Logical ranks: training that gives the same bits on any number of ranks.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include <paceline/api.h>

namespace paceline {
namespace detail {
class LogicalRanksCore;
}  // namespace detail

/// What a logical rank needs to continue on another rank, or in another job.
struct LogicalRankState {
  /// The state of the CPU's random number generator, as at::Generator::get_state gives it.
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

/// The logical ranks of a job, of which this rank runs some; see DdpOptions::logical_ranks. Without
/// that option, each rank is one logical rank.
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
/// - The CPU's default random number generator is the logical rank's own. Outside the loop, it is
///   the process's.
/// - Buffers of the model are what logical rank 0 left in the last step. After the loop, all ranks
///   have those that logical rank 0 left in this one; a loop without a backward changes none.
/// - `.grad` is as it was before the loop. To accumulate, run several backwards in the body. All of
///   them but the last must be under no_sync.
/// - The body must run one synchronised backward, or none for any logical rank.
///
/// If an exception ends the loop before the backward of the last logical rank, random numbers and
/// buffers are as before the loop. The next loop then aborts the step, so that the other ranks
/// throw Mismatch, and zeroes the gradients that were defined before the loop. All ranks can repeat
/// the step. Do not leave the loop by break or return; if you did, the next loop throws UsageError.
///
/// The backward of the last logical rank is collective. One loop at a time may run on a thread.
class PACELINE_API LogicalRanks {
 public:
  /// Used by DistributedDataParallel::logical_ranks().
  explicit LogicalRanks(std::shared_ptr<detail::LogicalRanksCore> core);
  /// Takes over the loop of `other`, which cannot be used afterwards.
  LogicalRanks(LogicalRanks&& other) noexcept
      : core_(std::move(other.core_)),
        loop_(std::exchange(other.loop_, 0)),
        exceptions_(other.exceptions_) {}
  LogicalRanks& operator=(LogicalRanks&&) = delete;
  ~LogicalRanks();

  /// The end of a loop.
  struct Sentinel {};
  /// The current logical rank of a loop.
  class PACELINE_API Iterator {
   public:
    /// Used by begin().
    explicit Iterator(detail::LogicalRanksCore& core) : core_(&core) {}
    /// Its number, from 0 to total() - 1.
    int operator*() const;
    /// Goes on to the next. Throws what the communication at the end of the loop throws, and as the
    /// backward does if the logical ranks have not done the same.
    Iterator& operator++();
    /// Whether the loop is over.
    bool operator==(Sentinel) const;

   private:
    detail::LogicalRanksCore* core_;
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
  /// each logical rank once; otherwise all throw UsageError. States move along. Not with
  /// static_graph. Collective.
  void assign(const LogicalRange& range);

  /// The state of a logical rank that this rank runs; a copy. Throws UsageError for another one.
  LogicalRankState state(int rank) const;
  /// Sets it. Throws UsageError for another rank's, or if the registered names differ.
  void set_state(int rank, const LogicalRankState& state);
  /// Makes something part of each logical rank's state, under a name of its own: `get` returns it
  /// for a logical rank, and `set` takes back what `get` returned, maybe on another rank. Register
  /// the same on all ranks. The model keeps copies of both functions.
  void register_state(const std::string& name, std::function<at::Tensor(int rank)> get,
                      std::function<void(int rank, const at::Tensor&)> set);
  /// Undoes it. Does nothing if the name is not registered.
  void unregister_state(const std::string& name);

 private:
  std::shared_ptr<detail::LogicalRanksCore> core_;
  std::uint64_t loop_ = 0;  // begun by this object; 0: none
  int exceptions_ = 0;      // under way when it began
};

}  // namespace paceline
