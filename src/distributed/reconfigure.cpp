#include <fmt/format.h>

#include <algorithm>
#include <mutex>

#include <paceline/reconfigure.h>

#include "base/deadline.h"
#include "distributed/backend.h"
#include "distributed/handle_exchange.h"
#include "distributed/make_group.h"
#include "distributed/process_state.h"
#include "distributed/translate.h"

namespace paceline {
namespace {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

bool reconfigures(c10d::ProcessGroup& group) {
  return distributed::translate("supports_reconfigure",
                                [&] { return group.getDefaultBackend()->supportsReconfigure(); });
}

[[noreturn]] void throw_fixed(const c10d::ProcessGroup& group, const char* operation) {
  throw UsageError(
      fmt::format("{}: the ranks of group {} cannot change. A world with "
                  "InitOptions::enable_reconfigure has ranks that can",
                  operation, group.getGroupName()));
}

GroupPtr reconfigurable(const ProcessGroup& group, const char* operation) {
  auto target = group.c10d();
  if (!reconfigures(*target)) throw_fixed(*target, operation);
  return target;
}

void form(c10d::ProcessGroup& target, std::int64_t uuid, const std::vector<std::string>& handles,
          std::optional<std::chrono::milliseconds> timeout) {
  c10d::ReconfigureOptions options;
  options.uuid = uuid;
  options.handles = handles;
  options.timeout = timeout;
  distributed::translate("reconfigure", [&] { target.reconfigure(options)->wait(); });
  auto& state = distributed::ProcessState::instance();
  const std::lock_guard lock(state.mutex);
  if (!state.world || state.world->group.get() != &target) return;
  state.world->topology = std::make_shared<const distributed::Topology>(
      distributed::Topology::one_node(target.getSize()));
}

}  // namespace

bool supports_reconfigure(const ProcessGroup& group) {
  return reconfigures(*group.c10d());
}

std::string get_reconfigure_handle(const ProcessGroup& group) {
  const auto target = reconfigurable(group, "get_reconfigure_handle");
  return distributed::translate("get_reconfigure_handle",
                                [&] { return target->get_reconfigure_handle(); });
}

void reconfigure(std::int64_t uuid, const std::vector<std::string>& handles,
                 const ProcessGroup& group, std::optional<std::chrono::milliseconds> timeout) {
  const auto target = reconfigurable(group, "reconfigure");
  form(*target, uuid, handles, timeout);
  auto& state = distributed::ProcessState::instance();
  const std::lock_guard lock(state.mutex);
  if (state.world && state.world->group == target) state.numbered_by_launcher = false;
}

void reconfigure(std::optional<std::chrono::milliseconds> timeout) {
  auto& state = distributed::ProcessState::instance();
  GroupPtr target = ProcessGroup().c10d();
  distributed::ActiveWorld::Reconfigurable job;
  std::chrono::milliseconds limit{};
  {
    const std::lock_guard lock(state.mutex);
    if (!state.world || !state.world->reconfigurable) throw_fixed(*target, "reconfigure");
    target = state.world->group;
    job = *state.world->reconfigurable;
    state.numbered_by_launcher = job.launched;
    limit = distributed::checked_timeout(timeout.value_or(state.world->timeout));
  }
  // Ranks that do not come may wait for this one, as after an exception of its own.
  const auto abort = [target] { distributed::abort_because(*target, "reconfigure was called"); };
  const auto deadline = base::Deadline::after(limit);
  for (bool formed = false; !formed;) {
    const auto round = distributed::translate("reconfigure", [&] {
      return distributed::exchange_handles(job.handles, job.rank, job.size,
                                           target->get_reconfigure_handle(), job.next_round,
                                           deadline, abort);
    });
    job.next_round = round.number + 1;
    try {
      form(*target, round.number, round.handles,
           std::max(deadline.remaining(), std::chrono::milliseconds(1)));
      formed = true;
    } catch (const PeerLost&) {
    }  // one that has given its handle: another process takes its place
  }
  const std::lock_guard lock(state.mutex);
  if (state.world) state.world->reconfigurable = job;
}

}  // namespace paceline
