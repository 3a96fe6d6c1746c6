#include "parallel/parameter_server/update_order.h"

#include <algorithm>
#include <utility>

namespace paceline::parameter_server {
namespace {

// A worker that does not come is lost after the same time as a wait for it, and the wait goes on.
constexpr std::chrono::seconds kToLoseWorkers{1};

}  // namespace

bool UpdateOrder::Worker::holds_others() const {
  return presence == Presence::awaited || presence == Presence::joining ||
         presence == Presence::active;
}

UpdateOrder::UpdateOrder(int workers, std::optional<std::int64_t> staleness, Apply apply)
    : staleness_(staleness), apply_(std::move(apply)), workers_(static_cast<std::size_t>(workers)) {
  for (int worker = 0; worker < workers; ++worker) stats_.workers[worker] = {};
}

template <typename Condition>
void UpdateOrder::await(Lock& lock, int worker, std::chrono::milliseconds limit,
                        Condition condition) {
  const auto ends = [&] { return failure_ || condition(); };
  const bool in_time =
      change_.wait_for(lock, limit, ends) || (!std::ranges::all_of(workers_, &Worker::has_come) &&
                                              change_.wait_for(lock, kToLoseWorkers, ends));
  if (!in_time) throw LateWorkers{slowest_others(worker)};
  throw_failure();
}

void UpdateOrder::throw_failure() const {
  if (failure_) std::rethrow_exception(failure_);
}

void UpdateOrder::changed() {
  has_changed_ = true;
  change_.notify_all();
}

std::optional<std::int64_t> UpdateOrder::slowest_clock() const {
  std::optional<std::int64_t> slowest;
  for (const Worker& worker : workers_) {
    if (worker.holds_others()) slowest = std::min(slowest.value_or(worker.clock), worker.clock);
  }
  return slowest;
}

std::vector<int> UpdateOrder::slowest_others(int worker) const {
  const auto slowest = slowest_clock();
  std::vector<int> found;
  for (int other = 0; other < static_cast<int>(workers_.size()); ++other) {
    if (other != worker && at(other).holds_others() && at(other).clock == slowest) {
      found.push_back(other);
    }
  }
  return found;
}

void UpdateOrder::meet(int worker) {
  const std::lock_guard lock(mutex_);
  at(worker).has_come = true;
  if (at(worker).presence != Presence::awaited) at(worker).presence = Presence::meeting;
}

std::int64_t UpdateOrder::join(int worker) {
  const std::lock_guard lock(mutex_);
  throw_failure();
  Worker& own = at(worker);
  if (own.presence == Presence::meeting) {
    const auto slowest = slowest_clock();
    own.clock = synchronous() ? stats_.version : slowest.value_or(own.clock);
  }
  own.presence = Presence::joining;
  return own.clock;
}

void UpdateOrder::enter(int worker, std::int64_t clock) {
  const std::lock_guard lock(mutex_);
  at(worker).clock = std::max(clock, at(worker).clock);
  at(worker).presence = Presence::active;
  complete_round();
  changed();
}

bool UpdateOrder::may_step(const Worker& worker) const {
  if (!staleness_) return true;
  // One that has entered with a later clock has no part in the steps before.
  if (synchronous()) return stats_.version >= worker.clock;
  return worker.clock + 1 <= slowest_clock().value_or(worker.clock) + *staleness_;
}

std::int64_t UpdateOrder::push(int worker, std::int64_t computed_at,
                               std::chrono::milliseconds limit) {
  Lock lock(mutex_);
  Worker& own = at(worker);
  own.arrived = Clock::now();
  own.computed_at = computed_at;
  await(lock, worker, limit, [&] { return may_step(own); });
  own.pending = true;
  ++own.clock;
  synchronous() ? complete_round() : step({worker});
  try {
    await(lock, worker, limit, [&] { return !own.pending; });
  } catch (const LateWorkers&) {
    // The memory of its gradient is for the worker's next process.
    own.pending = false;
    own.presence = Presence::lost;
    own.reason = "it has waited as long as it may";
    complete_round();
    changed();
    throw;
  }
  return stats_.version;
}

std::int64_t UpdateOrder::pull(int worker, std::chrono::milliseconds limit,
                               const std::function<void()>& copy) {
  Lock lock(mutex_);
  await(lock, worker, limit, [&] { return !synchronous() || stats_.version >= at(worker).clock; });
  copy();
  return stats_.version;
}

// In synchronous mode: steps if no worker is missing any more.
void UpdateOrder::complete_round() {
  if (!synchronous()) return;
  std::vector<int> here;
  for (std::size_t i = 0; i < workers_.size(); ++i) {
    if (workers_[i].pending) here.push_back(static_cast<int>(i));
  }
  const auto slowest = slowest_clock();
  if (!here.empty() && slowest.value_or(stats_.version + 1) > stats_.version) {
    step(here);
  } else if (here.empty() && slowest.value_or(0) > stats_.version) {
    // Another server has made a step of a gradient that was lost here with its worker.
    stats_.version = *slowest;
    changed();
  }
}

void UpdateOrder::step(const std::vector<int>& workers) {
  try {
    throw_failure();
    apply_(workers);
  } catch (...) {
    failure_ = std::current_exception();
    return changed();
  }
  for (const int worker : workers) record(worker);
  ++stats_.version;
  changed();
}

void UpdateOrder::record(int worker) {
  Worker& own = at(worker);
  own.pending = false;
  auto& its = stats_.workers[worker];
  ++its.updates;
  its.waited += Clock::now() - own.arrived;
  ++stats_.staleness[stats_.version - own.computed_at];
  const auto lead = own.clock - slowest_clock().value_or(own.clock);
  stats_.largest_lead = std::max(stats_.largest_lead, lead);
}

void UpdateOrder::part(int worker, Presence presence, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  at(worker).presence = presence;
  at(worker).reason = reason;
  complete_round();
  changed();
}

void UpdateOrder::fail(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  if (!failure_) failure_ = std::move(error);
  changed();
}

void UpdateOrder::check_failure() const {
  const std::lock_guard lock(mutex_);
  throw_failure();
}

void UpdateOrder::await_change(std::chrono::milliseconds time) {
  Lock lock(mutex_);
  change_.wait_for(lock, time, [&] { return has_changed_; });
  has_changed_ = false;
}

Presence UpdateOrder::presence(int worker) const {
  const std::lock_guard lock(mutex_);
  return at(worker).presence;
}

bool UpdateOrder::is_over() const {
  const std::lock_guard lock(mutex_);
  return std::ranges::all_of(workers_, [](const Worker& worker) {
    return worker.presence == Presence::left || worker.presence == Presence::lost;
  });
}

std::vector<std::pair<int, std::string>> UpdateOrder::lost() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::pair<int, std::string>> lost;
  for (std::size_t i = 0; i < workers_.size(); ++i) {
    if (workers_[i].presence != Presence::lost) continue;
    lost.emplace_back(static_cast<int>(i), workers_[i].reason);
  }
  return lost;
}

ParameterServerStats UpdateOrder::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

}  // namespace paceline::parameter_server
