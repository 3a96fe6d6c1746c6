#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <exception>
#include <numeric>
#include <span>
#include <utility>

#include <paceline/distributed.h>

#include "base/environment.h"
#include "base/log.h"
#include "distributed/backend.h"
#include "distributed/find_topology.h"
#include "distributed/process_state.h"
#include "distributed/rendezvous.h"
#include "distributed/translate.h"
#include "trace/timeline.h"

namespace paceline {

using distributed::ActiveWorld;
using distributed::ProcessState;

namespace {

c10::intrusive_ptr<c10d::ProcessGroup> make_group(const std::string& backend_name,
                                                  distributed::BackendRequest request) {
  const auto& kind = distributed::find_backend(backend_name);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(request.store, request.rank, request.size);
  const std::string name = request.group_name;
  auto backend = distributed::translate(
      fmt::format("forming group {} over the backend {}", name, backend_name).c_str(),
      [&] { return kind.make(std::move(request)); });
  group->setBackend(c10::DeviceType::CPU, kind.type, backend);
  group->setDefaultBackend(kind.type);
  group->setGroupName(name);
  return group;
}

void check_timeout(std::chrono::milliseconds timeout) {
  if (timeout > std::chrono::milliseconds(0)) return;
  throw UsageError(fmt::format("timeout of {} ms: it must be positive", timeout.count()));
}

void check_reach(const std::string& backend, const std::string& group,
                 const distributed::Topology& topology, std::span<const int> ranks) {
  if (!distributed::find_backend(backend).one_node) return;
  const std::size_t nodes = topology.nodes_of(ranks).size();
  if (nodes <= 1) return;
  throw UsageError(fmt::format(
      "the backend {} reaches the ranks of one node, and those of group {} run on {}, by "
      "{}: {}. Use the backend gloo; groups of ranks of one node may use {}",
      backend, group, nodes, topology.source(), topology.describe(ranks), backend));
}

std::vector<int> every_rank(int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// By group rank; empty if there is one node.
std::vector<int> nodes_of(const distributed::Topology& topology, std::span<const int> ranks) {
  std::vector<int> nodes;
  if (topology.nodes() == 1) return nodes;
  for (const int rank : ranks) nodes.push_back(topology.node_of(rank));
  return nodes;
}

std::unique_ptr<ActiveWorld> form_world(const InitOptions& options, const distributed::Plan& plan,
                                        int attempt,
                                        std::shared_ptr<const shm::Membership> processes) {
  auto met = distributed::rendezvous(plan, options, base::environment(), attempt, processes.get());

  auto world = std::make_unique<ActiveWorld>();
  world->store = met.store;
  world->backend = options.backend;
  world->timeout = options.timeout;
  world->backend_options = options.backend_options;
  world->host = met.host;
  const std::vector<int> ranks = every_rank(met.size);
  distributed::BackendRequest request{
      .store = c10::make_intrusive<c10d::PrefixStore>("topology", world->store),
      .rank = met.rank,
      .size = met.size,
      .timeout = options.timeout,
      .group_name = "world",
      .options = options.backend_options,
      .sockets = std::move(met.sockets),
      .host = met.host,
      .processes = std::move(processes)};
  auto found = distributed::find_topology(
      request, plan, base::environment(), [&](const distributed::Topology& topology) {
        check_reach(options.backend, request.group_name, topology, ranks);
      });
  request.store = c10::make_intrusive<c10d::PrefixStore>("world", world->store);
  request.nodes = nodes_of(found.topology, ranks);
  request.met = found.exchanged;
  world->topology = std::make_shared<const distributed::Topology>(std::move(found.topology));
  world->group = make_group(options.backend, std::move(request));
  return world;
}

// `lock` holds the state's mutex; not after an exception.
ActiveWorld& active_world(std::unique_lock<std::mutex>& lock) {
  auto& state = ProcessState::instance();
  if (state.world) return *state.world;
  lock.unlock();
  state.run_deferred_abort();
  throw UsageError("there is no world: call init_process_group first, and keep its World alive");
}

using Place = distributed::Placement::Variables;

// Without a world, and in a world of one, which may be a part of what a launcher started, by the
// launcher.
Place place_in(const ActiveWorld* world) {
  if (world == nullptr || world->group->getSize() == 1) {
    const auto& environment = base::environment();
    return {environment.node_rank.value_or(0), environment.local_rank.value_or(0),
            environment.local_world_size.value_or(1)};
  }
  const int rank = world->group->getRank();
  const int node = world->topology->node_of(rank);
  return {node, world->topology->local_rank_of(rank), world->topology->local_size(node)};
}

Place current_place() {
  auto& state = ProcessState::instance();
  std::lock_guard lock(state.mutex);
  return place_in(state.world.get());
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

}  // namespace

World::World() : exceptions_at_start_(std::uncaught_exceptions()) {}

World::World(World&& other) noexcept
    : owner_(std::exchange(other.owner_, false)),
      exceptions_at_start_(other.exceptions_at_start_) {}

World& World::operator=(World&& other) noexcept {
  std::swap(owner_, other.owner_);
  std::swap(exceptions_at_start_, other.exceptions_at_start_);
  return *this;
}

World::~World() {
  if (!owner_) return;
  auto& state = ProcessState::instance();
  if (std::uncaught_exceptions() <= exceptions_at_start_) {
    state.leave();
  } else if (state.in_record()) {
    state.defer_abort();
  } else {
    state.abort("its World was left by an exception (paceline::record would tell its text)");
  }
}

World init_process_group(InitOptions options) {
  auto& state = ProcessState::instance();
  state.run_deferred_abort();
  distributed::find_backend(options.backend);
  check_timeout(options.timeout);
  distributed::Plan plan;
  int attempt = 0;
  std::shared_ptr<const shm::Membership> processes;
  {
    std::lock_guard lock(state.mutex);
    if (state.world) {
      throw UsageError("init_process_group was called twice: destroy the first World before");
    }
    // Throws before it counts the attempt, so that all ranks count the same number of attempts.
    plan = distributed::plan_rendezvous(options, base::environment(), state.inits == 0);
    attempt = state.inits++;
    state.numbered_by_launcher = plan.launched;
    // Without a launcher, another process may have replaced one that ended.
    const auto& last = state.last_processes;
    if (plan.launched && last.rank == plan.rank && last.size == plan.size) processes = last.watch;
  }
  auto world = form_world(options, plan, attempt, std::move(processes));
  base::log(LogLevel::debug, "distributed init (rank {} of {}): {}, {}", world->group->getRank(),
            world->group->getSize(), options.backend, options.init_method);
  const Place place = place_in(world.get());
  trace::Timeline::start(world->group->getRank(), world->group->getSize(),
                         {.number = place.node, .ranks = place.local_size});
  std::lock_guard lock(state.mutex);
  state.last_node = place.node;
  state.world = std::move(world);
  return {};
}

void destroy_process_group(const ProcessGroup& group) {
  auto& state = ProcessState::instance();
  if (!group.is_member() || !is_initialized()) return;
  const auto target = group.c10d();
  if (target == ProcessGroup().c10d()) return state.leave();
  state.leave(target);
}

bool is_initialized() {
  auto& state = ProcessState::instance();
  std::lock_guard lock(state.mutex);
  return state.world != nullptr;
}

bool is_paceline_available() {
  return distributed::is_backend_available("paceline");
}
bool is_gloo_available() {
  return distributed::is_backend_available("gloo");
}

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
  std::unique_lock lock(ProcessState::instance().mutex);
  ActiveWorld& world = active_world(lock);
  const int size = world.group->getSize();
  if (ranks.empty()) ranks = every_rank(size);
  std::sort(ranks.begin(), ranks.end());
  if (ranks.front() < 0 || ranks.back() >= size ||
      std::adjacent_find(ranks.begin(), ranks.end()) != ranks.end()) {
    throw UsageError(fmt::format("new_group({}): ranks must be different and from 0 to {}",
                                 fmt::join(ranks, ", "), size - 1));
  }
  const std::string name = std::to_string(++world.groups_made);
  const std::string backend = options.backend.value_or(world.backend);
  const auto timeout = options.timeout.value_or(world.timeout);
  check_timeout(timeout);
  distributed::find_backend(backend);

  ProcessGroup group;
  const auto mine = std::find(ranks.begin(), ranks.end(), world.group->getRank());
  group.member_ = mine != ranks.end();
  if (!group.member_) return group;
  check_reach(backend, name, *world.topology, ranks);
  distributed::BackendRequest request{
      .store = c10::make_intrusive<c10d::PrefixStore>("group " + name, world.store),
      .rank = static_cast<int>(mine - ranks.begin()),
      .size = static_cast<int>(ranks.size()),
      .timeout = timeout,
      .group_name = name,
      .options = options.backend_options,
      .world_ranks = ranks,
      .nodes = nodes_of(*world.topology, ranks),
      .host = world.host,
      .check_peers = [group = world.group, ranks] { distributed::check_peers(*group, ranks); }};
  const bool unset = std::holds_alternative<std::monostate>(request.options);
  if (unset && backend == world.backend) request.options = world.backend_options;
  const auto whole = world.group;
  lock.unlock();
  c10::intrusive_ptr<c10d::ProcessGroup> made;
  try {
    made = make_group(backend, std::move(request));
  } catch (const PeerLost&) {
    // The world knows the cause, and all ranks throw its text.
    distributed::await_loss(*whole, ranks);
    throw;
  }
  lock.lock();
  active_world(lock).groups.push_back({made, backend, std::move(ranks)});
  lock.unlock();
  group.group_ = std::move(made);
  return group;
}

int get_rank(const ProcessGroup& group) {
  if (!group.is_member()) return -1;
  if (!is_initialized()) return base::environment().rank.value_or(0);
  return group.c10d()->getRank();
}

int get_world_size(const ProcessGroup& group) {
  if (!group.is_member()) return -1;
  if (!is_initialized()) return base::environment().world_size.value_or(1);
  return group.c10d()->getSize();
}

int get_local_rank() {
  return current_place().local_rank;
}
int get_local_world_size() {
  return current_place().local_size;
}
int get_node_rank() {
  return current_place().node;
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
