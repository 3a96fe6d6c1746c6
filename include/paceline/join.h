#pragma once

#include <paceline/api.h>
#include <paceline/distributed.h>

#include <functional>
#include <vector>

namespace paceline {

struct JoinOptions {
  // Whether DistributedDataParallel divides sums of gradients by the number of all ranks, as if
  // those that have joined had gradients of zero; otherwise by the number of those that have not.
  // With Average::samples it does neither: the samples decide.
  bool divide_by_initial_world_size = true;
  // False where inputs are known to be even: then `join` just calls the body.
  bool enable = true;
  // As soon as some ranks have no inputs left, all ranks throw an Error that names them.
  bool throw_on_early_termination = false;
};

namespace detail {
class JoinContext;
}

// Something whose steps have collectives in them, and which a rank without inputs can take part
// in. DistributedDataParallel converts to one.
class PACELINE_API Joinable {
 public:
  virtual ~Joinable();
  virtual ProcessGroup join_process_group() const = 0;
  // On a rank whose body has ended, once for each step that others take: the counterparts of a
  // step's collectives.
  virtual void main_hook() = 0;
  // On every rank when all bodies have ended. `last`: a rank of the group that took part in the
  // last step, and from which the others can have the final state.
  virtual void post_hook(int last) = 0;

 protected:
  Joinable() = default;
  Joinable(const Joinable&) = delete;
  Joinable& operator=(const Joinable&) = delete;

  // At the start of a step, before its collectives: tells those that have joined. Collective; does
  // nothing outside `join`, and for all but the first of its joinables.
  void notify_join();
  // Null outside `join`.
  const JoinOptions* join_options() const;
  // In a step, the first rank of the group that has not joined.
  int first_active() const;
  bool all_active() const;

 private:
  friend class detail::JoinContext;
  detail::JoinContext* context_ = nullptr;
};

// Runs `body`, a training loop, on ranks that may have different numbers of batches. Every rank of
// the joinables' group, which is the same for all, must call it. A rank whose body has ended takes
// part in the steps of the others, shadowing the joinables' collectives (of none else: so neither
// calls of the body's own nor SyncBatchNorm), until all have ended; then those
// that ended early get the model of those that came last. Each step must begin with a forward of
// every joinable, in the same order on all ranks.
//
// Exceptions of the body pass through; the other ranks then find this one missing.
PACELINE_API void join(const std::vector<std::reference_wrapper<Joinable>>& joinables,
                       const std::function<void()>& body, const JoinOptions& options = {});

}  // namespace paceline
