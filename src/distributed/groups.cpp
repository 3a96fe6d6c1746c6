#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <utility>
#include <variant>

#include <paceline/distributed.h>

#include "base/address.h"
#include "base/environment.h"
#include "distributed/backend.h"
#include "distributed/hook_scope.h"
#include "distributed/make_group.h"
#include "distributed/process_state.h"

namespace paceline {

using distributed::ActiveWorld;
using distributed::ProcessState;

namespace {

// `lock` holds the state's mutex; not after an exception.
ActiveWorld& active_world(std::unique_lock<std::mutex>& lock) {
  auto& state = ProcessState::instance();
  if (state.world) return *state.world;
  lock.unlock();
  state.run_deferred_abort();
  throw UsageError("there is no world: call init_process_group first, and keep its World alive");
}

// Throws UsageError for a group that destroy_process_group has ended.
void check_not_destroyed(const c10d::ProcessGroup& group) {
  if (group.getStore()) return;
  try {
    static_cast<void>(group.getDefaultBackend());
  } catch (const c10::Error&) {
    throw UsageError("the group has no backend any more: destroy_process_group has ended it");
  }
}

// new_group's ranks, of a world of `size`: sorted, and all of them if none was given.
std::vector<int> sorted_members(std::vector<int> ranks, int size) {
  if (ranks.empty()) ranks = distributed::every_rank(size);
  std::sort(ranks.begin(), ranks.end());
  if (ranks.front() < 0 || ranks.back() >= size ||
      std::adjacent_find(ranks.begin(), ranks.end()) != ranks.end()) {
    throw UsageError(fmt::format("new_group({}): ranks must be different and from 0 to {}",
                                 fmt::join(ranks, ", "), size - 1));
  }
  return ranks;
}

// What a member asks of the backend.
distributed::BackendRequest request_in(const ActiveWorld& world, const std::string& name,
                                       const std::string& backend, const GroupOptions& options,
                                       std::chrono::milliseconds timeout,
                                       const std::vector<int>& ranks) {
  const auto mine = std::find(ranks.begin(), ranks.end(), world.group->getRank());
  distributed::BackendRequest request{
      .store = c10::make_intrusive<c10d::PrefixStore>("group " + name, world.store),
      .store_server = world.store_server,
      .rank = static_cast<int>(mine - ranks.begin()),
      .size = static_cast<int>(ranks.size()),
      .timeout = timeout,
      .group_name = name,
      .options = options.backend_options,
      .members = ranks,
      .nodes = distributed::nodes_of(*world.topology, ranks),
      .host = world.host,
      .check_peers =
          [group = c10::weak_intrusive_ptr(world.group), ranks] {
            if (const auto alive = group.lock()) distributed::check_peers(*alive, ranks);
          },
      .mpi = world.mpi};
  const bool unset = std::holds_alternative<std::monostate>(request.options);
  if (unset && backend == world.backend) request.options = world.backend_options;
  return request;
}

// If a rank of the group is lost meanwhile, `whole`, the world, knows the cause, and all ranks
// throw its text.
c10::intrusive_ptr<c10d::ProcessGroup> make_group_within(c10d::ProcessGroup& whole,
                                                         const std::string& backend,
                                                         distributed::BackendRequest request) {
  const std::vector<int> ranks = request.members;
  try {
    return distributed::make_group(backend, std::move(request));
  } catch (const PeerLost&) {
    distributed::await_loss(whole, ranks);
    throw;
  }
}

}  // namespace

ProcessGroup::ProcessGroup(c10::intrusive_ptr<c10d::ProcessGroup> group)
    : group_(std::move(group)) {
  if (!group_) throw UsageError("ProcessGroup got a null pointer; it needs a c10d::ProcessGroup");
}

c10::intrusive_ptr<c10d::ProcessGroup> ProcessGroup::c10d() const {
  if (!member_) throw UsageError("this rank is not a member of the group");
  if (group_) {
    auto group = c10::static_intrusive_pointer_cast<c10d::ProcessGroup>(group_);
    check_not_destroyed(*group);
    return group;
  }
  std::unique_lock lock(ProcessState::instance().mutex);
  return active_world(lock).group;
}

ProcessGroup new_group(std::vector<int> ranks, const GroupOptions& options) {
  distributed::check_not_forked("new_group");  // it would take the parent's place in the store
  std::unique_lock lock(ProcessState::instance().mutex);
  ActiveWorld& world = active_world(lock);
  // Its store has keys of earlier ranks.
  if (world.reconfigurable) {
    throw UsageError("new_group: a world with enable_reconfigure has no smaller groups");
  }
  ranks = sorted_members(std::move(ranks), world.group->getSize());
  const auto timeout = distributed::checked_timeout(options.timeout.value_or(world.timeout));
  const std::string backend = options.backend.value_or(world.backend);
  distributed::check_size(backend, static_cast<int>(ranks.size()));
  // Groups of the same number meet: a call that was refused on this rank alone does not count.
  const std::string name = std::to_string(++world.groups_made);

  ProcessGroup group;
  group.member_ = std::ranges::binary_search(ranks, world.group->getRank());
  if (!group.member_) return group;
  distributed::check_reach(backend, name, *world.topology, ranks);
  auto request = request_in(world, name, backend, options, timeout, ranks);
  const auto whole = world.group;
  lock.unlock();
  auto made = make_group_within(*whole, backend, std::move(request));
  lock.lock();
  active_world(lock).groups.push_back({made, backend, std::move(ranks)});
  lock.unlock();
  group.group_ = std::move(made);
  return group;
}

Subgroups new_subgroups(std::optional<int> group_size, const GroupOptions& options) {
  std::vector<std::vector<int>> parts;
  if (group_size) {
    const int size = get_world_size();
    if (*group_size < 1 || size % *group_size != 0) {
      throw UsageError(
          fmt::format("new_subgroups of {} ranks: it must divide the {} ranks of the "
                      "world into equal groups",
                      *group_size, size));
    }
    for (int rank = 0; rank < size; ++rank) {
      if (rank % *group_size == 0) parts.emplace_back();
      parts.back().push_back(rank);
    }
  } else {
    for (Node& node : topology()) parts.push_back(std::move(node.ranks));
  }
  Subgroups groups;
  for (std::vector<int>& ranks : parts) {
    groups.all.push_back(new_group(std::move(ranks), options));
    if (groups.all.back().is_member()) groups.current = groups.all.back();
  }
  return groups;
}

std::vector<Node> topology() {
  std::unique_lock lock(ProcessState::instance().mutex);
  const distributed::Topology& found = *active_world(lock).topology;
  std::vector<Node> nodes;
  for (int node = 0; node < found.nodes(); ++node) {
    // The ranks of a world on one node may have exchanged nothing.
    const std::string& host = found.host_of(node);
    nodes.push_back({host.empty() ? base::host_name() : host, found.ranks_on(node)});
  }
  return nodes;
}

void destroy_process_group(const ProcessGroup& group) {
  auto& state = ProcessState::instance();
  if (!group.is_member() || !is_initialized()) return;
  distributed::HookScope::check_not_active("destroy_process_group");
  const auto target = group.c10d();
  if (target == ProcessGroup().c10d()) return state.leave();
  state.leave(target);
}

int get_rank(const ProcessGroup& group) {
  if (!group.is_member()) return -1;
  if (!group.group_ && !is_initialized()) return base::environment().rank.value_or(0);
  return group.c10d()->getRank();
}

int get_world_size(const ProcessGroup& group) {
  if (!group.is_member()) return -1;
  if (!group.group_ && !is_initialized()) return base::environment().world_size.value_or(1);
  return group.c10d()->getSize();
}

std::string get_backend(const ProcessGroup& group) {
  const auto target = group.c10d();
  auto& state = ProcessState::instance();
  std::lock_guard lock(state.mutex);
  if (state.world && target == state.world->group) return state.world->backend;
  if (state.world) {
    for (const auto& member : state.world->groups) {
      if (member.group == target) return member.backend;
    }
  }
  return target->getBackendName();
}

}  // namespace paceline
