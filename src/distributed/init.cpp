#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <exception>
#include <string>
#include <utility>

#include <paceline/communicator.h>
#include <paceline/distributed.h>

#include "base/environment.h"
#include "base/log.h"
#include "distributed/backend.h"
#include "distributed/find_topology.h"
#include "distributed/forked_child.h"
#include "distributed/intraop_threads.h"
#include "distributed/make_group.h"
#include "distributed/place.h"
#include "distributed/process_state.h"
#include "distributed/rendezvous/communicator.h"
#include "distributed/rendezvous/rendezvous.h"
#include "distributed/spawn_calls.h"
#include "trace/timeline.h"

namespace paceline {

using distributed::ActiveWorld;
using distributed::ProcessState;

namespace {

// One of this process's calls of init_process_group.
struct Attempt {
  distributed::Plan plan;
  int number;
  std::shared_ptr<const shm::Membership> processes;  // see BackendRequest
  std::optional<MpiHandle> mpi{};                    // see BackendRequest
};

void check_no_world(const ProcessState& state) {
  if (state.world) {
    throw UsageError("init_process_group was called twice: destroy the first World before");
  }
}

Attempt begin_attempt(const InitOptions& options) {
  auto& state = ProcessState::instance();
  std::lock_guard lock(state.mutex);
  check_no_world(state);
  // Throws before it counts the attempt, so that all ranks count the same number of attempts.
  const bool has_sockets = !state.attempts.contains(distributed::kInheritedKeys);
  Attempt attempt{distributed::plan_rendezvous(options, base::refresh_environment(), has_sockets),
                  0, nullptr};
  distributed::check_size(options.backend, attempt.plan.size);
  attempt.number = state.attempts[distributed::place_of_keys(attempt.plan)]++;
  // With other ranks the launcher's numbers mean other processes. See reconfigure, too.
  state.numbered_by_launcher = attempt.plan.launched && !options.enable_reconfigure;
  // Without a launcher, another process may have replaced one that ended.
  const auto& last = state.last_processes;
  const auto& plan = attempt.plan;
  if (plan.launched && last.rank == plan.rank && last.size == plan.size) {
    attempt.processes = last.watch;
  }
  return attempt;
}

distributed::BackendRequest world_request(const InitOptions& options, distributed::Rendezvous met,
                                          const Attempt& attempt) {
  return {.store_server = met.store_server,
          .rank = met.rank,
          .size = met.size,
          .timeout = options.timeout,
          .group_name = "world",
          .options = options.backend_options,
          .sockets = std::move(met.sockets),
          .host = std::move(met.host),
          .mpi = attempt.mpi,
          .enable_reconfigure = options.enable_reconfigure,
          .processes = attempt.processes};
}

// One whose ranks are not known yet is on one node: its backend forms no other groups.
distributed::FoundTopology topology_of(const distributed::BackendRequest& request,
                                       const InitOptions& options, const Attempt& attempt) {
  if (options.enable_reconfigure) return {distributed::Topology::one_node(request.size), false};
  return distributed::find_topology(request, options.backend, attempt.plan, base::environment(),
                                    [&](const distributed::Topology& topology) {
                                      distributed::check_reach(
                                          options.backend, request.group_name, topology,
                                          distributed::every_rank(request.size));
                                    });
}

std::unique_ptr<ActiveWorld> form_world(const InitOptions& options, const Attempt& attempt) {
  auto met = distributed::rendezvous(attempt.plan, options, base::environment(), attempt.number,
                                     attempt.processes.get());
  const auto round = met.round;  // until all ranks have met
  auto world = std::make_unique<ActiveWorld>();
  world->store = met.store;
  world->store_server = met.store_server;
  world->backend = options.backend;
  world->timeout = options.timeout;
  world->backend_options = options.backend_options;
  world->host = met.host;
  world->mpi = attempt.mpi;
  if (options.enable_reconfigure) {
    world->reconfigurable = {
        .rank = met.rank,
        .size = met.size,
        .launched = attempt.plan.launched,
        .handles = c10::make_intrusive<c10d::PrefixStore>("handles", world->store)};
  }
  auto request = world_request(options, std::move(met), attempt);
  request.store = c10::make_intrusive<c10d::PrefixStore>("topology", world->store);
  auto found = topology_of(request, options, attempt);
  request.store = c10::make_intrusive<c10d::PrefixStore>("world", world->store);
  request.nodes = distributed::nodes_of(found.topology, distributed::every_rank(request.size));
  request.met = found.exchanged;
  world->topology = std::make_shared<const distributed::Topology>(std::move(found.topology));
  world->group = distributed::make_group(options.backend, std::move(request));
  distributed::limit_intraop_threads(base::environment(), *world->topology, attempt.plan.rank);
  return world;
}

// Where two could have numbered the ranks. One line of a job is enough for its user.
void log_launcher(const distributed::Plan& plan) {
  const auto& environment = base::environment();
  const auto& launched = environment.launched;
  if (!plan.launched || !launched || !launched->size) return;
  const std::string variables = fmt::format("{} ({})", launched->variables, launched->launcher);
  const LogLevel level = plan.rank == 0 ? LogLevel::info : LogLevel::debug;
  if (environment.numbered_by_launched) {
    base::log(level, "rank {} of {}, from {}", plan.rank, plan.size, variables);
  } else {
    base::log(level, "rank {} of {}, from RANK and WORLD_SIZE, not from {}", plan.rank, plan.size,
              variables);
  }
}

void prepare(InitOptions& options) {
  distributed::check_forked_child();
  auto& state = ProcessState::instance();
  state.run_deferred_abort();
  {
    const std::lock_guard lock(state.mutex);
    if (!state.world) state.last_job.reset();  // its store may have the port of the next one
  }
  options.timeout = distributed::checked_timeout(options.timeout);
}

// Returns the world's number.
std::uint64_t enter(const InitOptions& options, const Attempt& attempt) {
  auto world = form_world(options, attempt);
  const int rank = world->group->getRank();
  const int size = world->group->getSize();
  base::log(LogLevel::debug, "distributed init (rank {} of {}): {}, {}", rank, size,
            options.backend, attempt.plan.world.empty() ? options.init_method : attempt.plan.world);
  const auto place = distributed::place_in(world.get());
  auto& state = ProcessState::instance();
  const std::lock_guard lock(state.mutex);
  check_no_world(state);  // of another thread's call, meanwhile
  trace::Timeline::start(rank, size, {.number = place.node, .ranks = place.local_size});
  state.last_node = place.node;
  state.last_job = world->reconfigurable;
  world->number = ++state.worlds;
  state.world = std::move(world);
  state.world_process = shm::fork_generation();
  return state.worlds;
}

}  // namespace

World::World(std::uint64_t number)
    : number_(number), exceptions_at_start_(std::uncaught_exceptions()) {}

World::World(World&& other) noexcept
    : number_(std::exchange(other.number_, 0)), exceptions_at_start_(other.exceptions_at_start_) {}

World& World::operator=(World&& other) noexcept {
  std::swap(number_, other.number_);
  std::swap(exceptions_at_start_, other.exceptions_at_start_);
  return *this;
}

World::~World() {
  if (number_ == 0) return;
  auto& state = ProcessState::instance();
  if (std::uncaught_exceptions() <= exceptions_at_start_ ||
      distributed::SpawnCalls::instance().function_returned) {
    state.leave(number_);
  } else if (state.in_record()) {
    state.defer_abort(number_);
  } else {
    state.abort(number_, "an exception left its World (paceline::record would pass on its text)");
  }
}

World init_process_group(InitOptions options) {
  prepare(options);
  const Attempt attempt = begin_attempt(options);
  if (attempt.number == 0) log_launcher(attempt.plan);
  return World(enter(options, attempt));
}

World init_process_group(const Communicator& communicator, InitOptions options) {
  auto plan = distributed::plan_communicator(communicator, options, [&] {
    prepare(options);
    distributed::check_size(options.backend, communicator.size());
    auto& state = ProcessState::instance();
    const std::lock_guard lock(state.mutex);
    check_no_world(state);
    state.numbered_by_launcher = false;
  });
  // It is no attempt, since ranks outside the communicator do not count it.
  return World(enter(options, {std::move(plan), 0, nullptr, communicator.mpi()}));
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
bool is_mpi_available() {
  return distributed::is_backend_available("mpi");
}

}  // namespace paceline
