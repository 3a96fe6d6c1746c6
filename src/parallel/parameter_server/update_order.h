#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <paceline/parameter_server_stats.h>

namespace paceline::parameter_server {

// Where a worker is in its life, as a server sees it.
enum class Presence {
  awaited,  // it has not come yet; others wait for it
  meeting,  // a new process of a worker that was lost or has left; nobody waits for it yet
  joining,  // it learns where the other servers are; others wait for it
  active,
  left,
  lost
};

// Thrown by a wait for steps of these workers, ascending, once its limit has passed.
struct LateWorkers {
  std::vector<int> workers;
};

// When a server applies the gradients of its workers, which are numbered from 0. A worker's clock
// is the number of its last step. Without torch: `apply` does the work.
//
// Thread-safe; a worker has one thread here. After an exception of `apply`, every call but
// `leave`, `lose`, `stats` and the questions throws it.
class UpdateOrder {
 public:
  // One step of the optimizer of the gradients of these workers, ascending. Called with the lock
  // held.
  using Apply = std::function<void(const std::vector<int>& workers)>;

  // `staleness`: see ParameterServerOptions.
  UpdateOrder(int workers, std::optional<std::int64_t> staleness, Apply apply);

  void meet(int worker);
  // Returns the lowest clock that it may enter with. Nobody passes that until it enters.
  std::int64_t join(int worker);
  // `clock`: what join returned, or more.
  void enter(int worker, std::int64_t clock);
  // The worker's gradient is here. Returns the version once it is applied. Throws LateWorkers after
  // `limit`; then the gradient does not count, and the worker is lost.
  std::int64_t push(int worker, std::int64_t computed_at, std::chrono::milliseconds limit);
  // Runs `copy` between two steps, and returns the version that it copied. Throws LateWorkers after
  // `limit`.
  std::int64_t pull(int worker, std::chrono::milliseconds limit, const std::function<void()>& copy);
  void leave(int worker) { part(worker, Presence::left, ""); }
  void lose(int worker, const std::string& reason) { part(worker, Presence::lost, reason); }

  // Ends all waits with this exception, if there is none yet.
  void fail(std::exception_ptr error);
  void check_failure() const;
  // Waits for `time` at most, unless something has changed after the call before.
  void await_change(std::chrono::milliseconds time);
  Presence presence(int worker) const;
  // Whether none is awaited, meeting, joining or active.
  bool is_over() const;
  // The workers that were lost, each with the reason.
  std::vector<std::pair<int, std::string>> lost() const;
  // The workers' numbers in place of ranks.
  ParameterServerStats stats() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Worker {
    Presence presence = Presence::awaited;
    bool has_come = false;  // its process, at any time
    std::int64_t clock = 0;
    std::int64_t computed_at = 0;
    Clock::time_point arrived{};
    bool pending = false;  // its gradient waits for its step
    std::string reason{};  // of its loss
    // Whether others wait for its steps.
    bool holds_others() const;
  };
  using Lock = std::unique_lock<std::mutex>;

  Worker& at(int worker) { return workers_[static_cast<std::size_t>(worker)]; }
  const Worker& at(int worker) const { return workers_[static_cast<std::size_t>(worker)]; }
  bool synchronous() const { return staleness_ == 0; }
  std::optional<std::int64_t> slowest_clock() const;
  std::vector<int> slowest_others(int worker) const;
  bool may_step(const Worker& worker) const;
  void part(int worker, Presence presence, const std::string& reason);
  void complete_round();
  void step(const std::vector<int>& workers);
  void record(int worker);
  void changed();
  void throw_failure() const;
  template <typename Condition>
  void await(Lock& lock, int worker, std::chrono::milliseconds limit, Condition condition);

  const std::optional<std::int64_t> staleness_;
  const Apply apply_;
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable change_;
  bool has_changed_ = false;
  std::vector<Worker> workers_;
  std::exception_ptr failure_;
  ParameterServerStats stats_;
};

}  // namespace paceline::parameter_server
