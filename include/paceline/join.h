#pragma once

/// @file
/// Training with uneven inputs.

#include <paceline/api.h>
#include <paceline/distributed.h>

#include <functional>
#include <vector>

namespace paceline {

/// Options of join.
struct JoinOptions {
  /// What DistributedDataParallel divides sums of gradients by. True: the number of all ranks, as
  /// if ranks that have joined had gradients of zero. False: the number of ranks that have not
  /// joined. Ignored with Average::samples, and with a communication hook: the hook must divide.
  bool divide_by_initial_world_size = true;
  /// False if inputs are known to be even: join() only calls the body.
  bool enable = true;
  /// Whether all ranks throw an Error that names the ranks without inputs, as soon as there are
  /// any.
  bool throw_on_early_termination = false;
};

namespace detail {
class JoinContext;
}

/// An object whose steps contain collectives. A rank without inputs matches them by main_hook.
/// DistributedDataParallel converts to one.
class PACELINE_API Joinable {
 public:
  virtual ~Joinable();
  /// The group of the collectives.
  virtual ProcessGroup join_process_group() const = 0;
  /// Calls the collectives of one step. Called on a rank whose body has ended, once for each step
  /// of the other ranks.
  virtual void main_hook() = 0;
  /// Called on every rank when all bodies have ended, but not with JoinOptions::enable = false.
  /// `last`: the group rank of a rank that took part in the last step, and so has the final state.
  virtual void post_hook(int last) = 0;

 protected:
  Joinable() = default;
  Joinable(const Joinable&) = delete;
  Joinable& operator=(const Joinable&) = delete;

  /// Notifies the ranks that have joined. Call it at the start of a step, before its collectives.
  /// Collective. Does nothing outside join(), and for all joinables of it but the first.
  void notify_join();
  /// The options of join(); null outside it.
  const JoinOptions* join_options() const;
  /// In a step: the last rank of the group that has not joined.
  int last_active() const;
  /// Whether no rank has joined.
  bool all_active() const;

 private:
  friend class detail::JoinContext;
  detail::JoinContext* context_ = nullptr;
};

/// Runs `body`, a training loop, on ranks that may have different numbers of batches. Every rank of
/// the joinables' group, which is the same for all of them, must call it.
///
/// A rank whose body has ended *has joined*: it calls the joinables' collectives (main_hook) in the
/// steps of the other ranks, until all bodies have ended. Then the ranks that ended early get the
/// model of a rank that ended last. A rank that has joined matches no other collective: neither the
/// body's own calls nor SyncBatchNorm's. In each step, use every joinable once, in the order of the
/// list: forward and backward of one DistributedDataParallel, then forward and backward of the
/// next.
///
/// If the body throws, the exception leaves join(). The other ranks throw an error that names this
/// one: when it leaves the group, or if it goes on, when they have waited for the timeout.
PACELINE_API void join(const std::vector<std::reference_wrapper<Joinable>>& joinables,
                       const std::function<void()>& body, const JoinOptions& options = {});

}  // namespace paceline
