#include "distributed/process_state.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/log.h"
#include "distributed/backend.h"

namespace paceline::distributed {
namespace {

template <typename Body>
void for_each_backend(const ActiveWorld& world, Body&& body) {
  const auto visit = [&](const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
    for (const auto& device : group->getDeviceTypes()) body(*group->getBackend(device.type()));
  };
  for (const auto& member : world.groups) visit(member.group);
  visit(world.group);
}

void shut_down(const ActiveWorld& world) noexcept {
  try {
    for_each_backend(world, [](c10d::Backend& backend) { backend.shutdown(); });
  } catch (const std::exception& error) {
    base::log(LogLevel::warning, "leaving the world: {}", error.what());
  }
}

void abort_world(const ActiveWorld& world, const std::string& text) noexcept {
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

// Never destroyed: a World may be a static object itself, and backends must not outlive LibTorch's
// own statics in an order nobody chose.
ProcessState& ProcessState::instance() {
  static ProcessState* const state = new ProcessState;
  return *state;
}

void ProcessState::leave() noexcept {
  std::unique_ptr<ActiveWorld> ending;
  {
    std::lock_guard lock(mutex);
    ending = std::move(world);
  }
  if (ending) shut_down(*ending);
}

void ProcessState::abort(const std::string& text) noexcept {
  std::unique_ptr<ActiveWorld> ending;
  {
    std::lock_guard lock(mutex);
    ending = std::move(world);
  }
  if (ending) abort_world(*ending, text);
}

void ProcessState::put_off_abort() noexcept {
  std::lock_guard lock(mutex);
  aborting_ = std::move(world);
}

void ProcessState::exit_record(const std::string& exception_text) noexcept {
  --record_depth_;
  if (aborting_) abort_world(*aborting_, exception_text);
  aborting_.reset();
}

int group_rank_of(const ProcessGroup& group, int world_rank) {
  const auto target = group.c10d();
  ProcessState& state = ProcessState::instance();
  std::lock_guard lock(state.mutex);
  if (!state.world || target == state.world->group) return world_rank;
  for (const auto& member : state.world->groups) {
    if (member.group != target) continue;
    const auto found = std::find(member.ranks.begin(), member.ranks.end(), world_rank);
    if (found != member.ranks.end()) return static_cast<int>(found - member.ranks.begin());
    throw UsageError(fmt::format("rank {} of the world is no member of the group", world_rank));
  }
  return world_rank;  // a group that the user made
}

}  // namespace paceline::distributed
