#include "distributed/process_state.h"

#include <fmt/format.h>
#include <pthread.h>

#include <algorithm>
#include <tuple>

#include "base/log.h"
#include "distributed/backend.h"
#include "distributed/debug/flight_recorder.h"
#include "distributed/handle_exchange.h"

namespace paceline::distributed {
namespace {

template <typename Body>
void for_each_backend(c10d::ProcessGroup& group, Body&& body) {
  for (const auto& device : group.getDeviceTypes()) body(*group.getBackend(device.type()));
}

// NCCL waits for the ends of its calls, which never come if a rank of them is lost.
void shut_down(c10d::ProcessGroup& group) {
  auto* const ours = dynamic_cast<ExtendedBackend*>(group.getDefaultBackend().get());
  for_each_backend(group, [&](c10d::Backend& backend) {
    const bool aborts = ours != nullptr && ours != &backend && ours->has_failed();
    aborts ? backend.abort() : backend.shutdown();
  });
}

template <typename Body>
void for_each_backend(const ActiveWorld& world, Body&& body) {
  for (const auto& member : world.groups) for_each_backend(*member.group, body);
  for_each_backend(*world.group, body);
}

void detach_flight_recorders(const ActiveWorld& world) noexcept {
  for (const auto& member : world.groups) detach_flight_recorder(*member.group);
  detach_flight_recorder(*world.group);
}

void shut_down(const ActiveWorld& world) noexcept {
  detach_flight_recorders(world);
  const auto leave = [](c10d::ProcessGroup& group) {
    try {
      shut_down(group);
    } catch (const std::exception& error) {
      base::log(LogLevel::warning, "leaving group {}: {}", group.getGroupName(), error.what());
    }
  };
  for (const auto& member : world.groups) leave(*member.group);
  leave(*world.group);
}

void abort_world(const ActiveWorld& world, const std::string& text) noexcept {
  detach_flight_recorders(world);
  try {
    for_each_backend(world, [&](c10d::Backend& backend) {
      if (auto* const ours = dynamic_cast<ExtendedBackend*>(&backend)) {
        ours->abort_because(text);
      } else {
        backend.abort();
      }
    });
  } catch (const std::exception& error) {
    base::log(LogLevel::warning, "aborting the world: {}", error.what());
  }
}

}  // namespace

// Never destroyed: a World may be a static object itself, and backends must not be destroyed after
// LibTorch's own statics. A forked child gets the mutex unlocked.
ProcessState& ProcessState::instance() {
  static ProcessState* const state = [] {
    ::pthread_atfork([] { instance().mutex.lock(); }, [] { instance().mutex.unlock(); },
                     [] { instance().mutex.unlock(); });
    return new ProcessState;
  }();
  return *state;
}

void ProcessState::leave(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  ActiveWorld::Member ending;
  {
    std::lock_guard lock(mutex);
    if (!world) return;  // another thread has just left it
    auto& groups = world->groups;
    const auto found =
        std::ranges::find(groups, group, [](const auto& member) { return member.group; });
    if (found == groups.end()) {
      throw UsageError(
          "destroy_process_group of a group that new_group did not make in this world");
    }
    ending = std::move(*found);
    groups.erase(found);
    if (world->process.is_forked_child()) {
      std::ignore = ending.group.release();
      return;
    }
  }
  detach_flight_recorder(*group);
  shut_down(*group);
  group->release_resources();
}

std::unique_ptr<ActiveWorld> ProcessState::take_world(std::uint64_t number) noexcept {
  std::lock_guard lock(mutex);
  if (!world || (number != 0 && number != world->number)) return nullptr;
  if (world->process.is_forked_child()) {
    std::ignore = world.release();
    return nullptr;
  }
  world_process = -1;
  if (!in_record()) last_job.reset();
  last_processes = {world->group->getRank(), world->group->getSize(), nullptr};
  try {
    const auto backend = world->group->getDefaultBackend();
    const auto* const ours = dynamic_cast<const ExtendedBackend*>(backend.get());
    if (ours != nullptr) last_processes.watch = ours->membership();
  } catch (const c10::Error&) {
    // The program has removed the backend from the group, so there is nothing to watch.
  }
  return std::move(world);
}

void ProcessState::leave(std::uint64_t number) noexcept {
  const auto ending = take_world(number);
  if (ending) shut_down(*ending);
}

void ProcessState::abort(std::uint64_t number, const std::string& text) noexcept {
  const auto ending = take_world(number);
  if (ending) abort_world(*ending, text);
}

void ProcessState::defer_abort(std::uint64_t number) noexcept {
  auto ending = take_world(number);
  if (!ending) return;
  run_deferred_abort();
  std::lock_guard lock(mutex);
  aborting_ = std::move(ending);
}

void ProcessState::run_deferred_abort(const std::string& text) noexcept {
  std::unique_ptr<ActiveWorld> ending;
  {
    std::lock_guard lock(mutex);
    ending = std::move(aborting_);
  }
  if (ending) abort_world(*ending, text);
}

void ProcessState::enter_record() {
  if (record_depth_++ > 0) return;
  record_thread_ = std::this_thread::get_id();
  record_process_ = {};
}

bool ProcessState::is_record_thread() const {
  return in_record() && record_thread_ == std::this_thread::get_id();
}

void ProcessState::exit_record(const std::string& exception_text) noexcept {
  --record_depth_;
  run_deferred_abort(exception_text.empty() ? kCaught : exception_text);
}

// A process that fails after the end of its world is replaced, and others wait for it.
void ProcessState::end_job(bool has_failed) noexcept {
  std::optional<ActiveWorld::Reconfigurable> job;
  {
    const std::lock_guard lock(mutex);
    job = std::exchange(last_job, std::nullopt);
    if (!job || has_failed || world || is_forked_within_record()) return;
  }
  try {
    finish_handle_exchange(job->handles, job->rank);
  } catch (const std::exception& error) {
    base::log(LogLevel::debug, "reconfigure: {}", error.what());  // the store has ended
  }
}

namespace {

// The global ranks of a group that is not ours, if its backend knows them; else empty.
std::vector<int> members_by_backend(c10d::ProcessGroup& group) {
  try {
    const auto options = group.getDefaultBackend()->getBackendOptions();
    const auto& ranks = options->global_ranks_in_group;
    return {ranks.begin(), ranks.end()};
  } catch (const c10::Error&) {
    return {};
  }
}

// The world's ranks by group rank; empty for the world itself, and if they are unknown.
std::vector<int> members_of(const ProcessGroup& group) {
  const auto target = group.c10d();
  ProcessState& state = ProcessState::instance();
  std::lock_guard lock(state.mutex);
  if (state.world) {
    for (const auto& member : state.world->groups) {
      if (member.group == target) return member.ranks;
    }
    if (target == state.world->group) return {};
  }
  return members_by_backend(*target);
}

[[noreturn]] void throw_forked(const char* operation) {
  throw UsageError(fmt::format(
      "{} in a forked child: the group belongs to the parent process. Start new processes instead "
      "of forking.",
      operation));
}

}  // namespace

void check_not_forked(const char* operation) {
  const auto owner = ProcessState::instance().world_process.load(std::memory_order_relaxed);
  if (owner >= 0 && owner != shm::fork_generation()) throw_forked(operation);
}

void check_not_forked(const shm::OwningProcess& owner, const char* operation) {
  if (owner.is_forked_child()) throw_forked(operation);
}

int group_rank_of(const ProcessGroup& group, int global_rank) {
  const auto members = members_of(group);
  if (members.empty()) return global_rank;
  const auto found = std::find(members.begin(), members.end(), global_rank);
  if (found != members.end()) return static_cast<int>(found - members.begin());
  throw UsageError(fmt::format("global rank {} is not a member of the group", global_rank));
}

int global_rank_of(const ProcessGroup& group, int group_rank) {
  const auto members = members_of(group);
  return members.empty() ? group_rank : members.at(static_cast<std::size_t>(group_rank));
}

}  // namespace paceline::distributed
