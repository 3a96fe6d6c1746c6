#include "distributed/rendezvous/plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "distributed/rendezvous/init_method.h"
#include "shm/membership/rank_set.h"

namespace paceline::distributed {
namespace {

constexpr const char* kBareVariables =
    "RANK, WORLD_SIZE, MASTER_ADDR=<rank 0's machine> and MASTER_PORT=<a free port there>";

// For env:// with neither a rank nor a world size from anywhere.
void check_alone(const base::Environment& environment) {
  const auto& launched = environment.launched;
  if (!launched || launched->size) return;
  throw UsageError(fmt::format(
      "init_process_group: {} started this as one of several processes ({}), but does not say how "
      "many there are, and each would train alone. Start the program with `paceline run`, or set "
      "{} for each process. For a process that is to be alone, call "
      "init_process_group({{.world_size = 1, .rank = 0}})",
      launched->launcher, launched->variables, kBareVariables));
}

// The launcher's own variables, if RANK or WORLD_SIZE hides them.
std::string hidden(const base::Environment& environment) {
  const auto& launched = environment.launched;
  const bool is_hidden =
      launched && (launched->size || launched->needs_launcher) && !environment.numbered_by_launched;
  return is_hidden ? fmt::format("{} started this process with {}", launched->launcher,
                                 launched->variables)
                   : "";
}

// Some clouds count machines by RANK and WORLD_SIZE, and a shell may have them from something else.
// A program that starts the ranks itself sets LOCAL_RANK, or more ranks than its launcher knows.
void check_contradiction(const base::Environment& environment) {
  const std::string launched = hidden(environment);
  if (launched.empty() || environment.local_rank) return;
  const bool is_whole = environment.rank && environment.world_size;
  const auto& known = environment.launched->size;
  if (is_whole && known && *environment.world_size >= *known) return;
  std::vector<std::string> given;
  if (environment.rank) given.push_back(fmt::format("RANK={}", *environment.rank));
  if (environment.world_size) {
    given.push_back(fmt::format("WORLD_SIZE={}", *environment.world_size));
  }
  const char* const advice =
      known ? "unset RANK and WORLD_SIZE" : "start the program with `paceline run`";
  throw UsageError(fmt::format(
      "init_process_group: {}, but {}. If they count machines, or are left from something else, "
      "{}; if they are right, set {}LOCAL_RANK too",
      fmt::join(given, " and "), launched, advice, is_whole ? "" : "both and "));
}

// The first that is set: the option, the init_method's, the variable.
int resolve(std::optional<int> option, const InitMethod& method, const char* key,
            std::optional<int> variable, const char* variable_name) {
  if (option) {
    if (*option >= 0) return *option;
    throw UsageError(
        fmt::format("init_process_group({{.{} = {}}}): it must not be negative; leave it "
                    "out to take it from the init_method",
                    key, *option));
  }
  if (const auto number = number_in_query(method, key)) return *number;
  if (variable) return *variable;
  throw UsageError(
      fmt::format("init_process_group does not know the {0}: give .{0}, ?{0}= in the "
                  "init_method, or set {1} (a launcher such as `paceline run` does)",
                  key, variable_name));
}

// The plan's rank and size.
void number_ranks(const InitOptions& options, const base::Environment& environment,
                  const InitMethod& method, Plan& plan) {
  plan.rank = resolve(options.rank, method, "rank", environment.rank, "RANK");
  plan.size =
      resolve(options.world_size, method, "world_size", environment.world_size, "WORLD_SIZE");
  if (plan.size < 1 || plan.size > shm::kMaxWorldSize) {
    throw UsageError(
        fmt::format("a world of {} ranks: 1 to {} are allowed", plan.size, shm::kMaxWorldSize));
  }
  if (plan.rank >= plan.size) {
    throw UsageError(fmt::format(
        "rank {} of a world of {}: ranks run from 0 to {}{}", plan.rank, plan.size, plan.size - 1,
        options.world_size && environment.world_size &&
                *options.world_size != *environment.world_size
            ? fmt::format("; the launcher started {} processes (WORLD_SIZE): leave .world_size out",
                          *environment.world_size)
            : ""));
  }
  plan.launched = plan.rank == environment.rank && plan.size == environment.world_size;
}

// What `paceline run` passed on.
void plan_inherited(const base::Environment& environment, bool has_sockets, Plan& plan) {
  plan.means = Plan::Means::inherited;
  plan.path = fmt::format("/proc/self/fd/{}", *environment.store_fd);
  plan.take_sockets = has_sockets && !environment.max_replacements;
  const int rank = environment.rank.value_or(plan.rank);
  const int size = environment.world_size.value_or(plan.size);
  if (!has_sockets || (plan.rank == rank && plan.size == size)) return;
  throw UsageError(
      fmt::format("init_process_group was asked for rank {} of {}, but `paceline run` started "
                  "this process as rank {} of {} (RANK, WORLD_SIZE): leave .rank and "
                  ".world_size out, or give an init_method or a store where such ranks meet",
                  plan.rank, plan.size, rank, size));
}

// The process that replaces another one would wait for ever for ranks that have met already.
void check_replacements(const base::Environment& environment, const InitOptions& options) {
  if (!environment.max_replacements || options.enable_reconfigure) return;
  throw UsageError(fmt::format(
      "init_process_group under `paceline run --max-replacements {}`, which replaces a process "
      "while the others go on: only a world with .enable_reconfigure can take it up "
      "(docs/errors.md). --max-restarts starts all processes again",
      *environment.max_replacements));
}

// Other ranks cannot learn a port that the system chooses.
void check_port(const Plan& plan, const std::string& source) {
  if (plan.port > 0 || plan.size == 1) return;
  throw UsageError(
      fmt::format("{}: port 0 stands for any free port, which the other ranks cannot learn; give a "
                  "port from 1 to 65535",
                  source));
}

void place_ranks(const base::Environment& environment, Plan& plan) {
  if (!plan.launched || !environment.local_world_size) return;
  plan.several_machines = *environment.local_world_size < plan.size;
  plan.one_machine = !plan.several_machines;
}

void plan_local(const base::LaunchedProcess& launched, Plan& plan) {
  plan.means = Plan::Means::local;
  plan.job = fmt::format("{}/{}", launched.launcher, launched.job);
}

void plan_environment(const base::Environment& environment, bool has_sockets, Plan& plan) {
  if (plan.size == 1) return;  // a world of one needs no rendezvous
  if (environment.store_fd) return plan_inherited(environment, has_sockets, plan);
  if (plan.launched && environment.numbered_by_launched) {
    const base::LaunchedProcess& launched = *environment.launched;
    if (!environment.master_addr && launched.is_local()) return plan_local(launched, plan);
    if (!environment.master_addr || !environment.master_port) {
      throw UsageError(
          fmt::format("{} started this process as rank {} of {} ({}), but does not say where rank "
                      "0 can be reached: set {} too, the same for all processes",
                      launched.launcher, plan.rank, plan.size, launched.variables,
                      environment.master_addr
                          ? "MASTER_PORT=<a free port on rank 0's machine>"
                          : "MASTER_ADDR=<rank 0's machine> and MASTER_PORT=<a free port there>"));
    }
  }
  plan.means = Plan::Means::tcp;
  if (!environment.master_addr || !environment.master_port) {
    const std::string launched = hidden(environment);
    throw UsageError(fmt::format(
        "env:// with RANK and WORLD_SIZE needs {} too{}",
        environment.master_addr ? "MASTER_PORT, a free port on rank 0's machine,"
                                : "MASTER_ADDR, the address of rank 0's machine,",
        launched.empty() ? ""
                         : fmt::format("; {}: to use these, unset RANK and WORLD_SIZE", launched)));
  }
  plan.host = *environment.master_addr;
  plan.port = *environment.master_port;
  check_port(plan, "MASTER_PORT=0");
  place_ranks(environment, plan);
  plan.agent = environment.use_agent_store;
  plan.serve = plan.rank == 0 && !plan.agent;
}

void plan_tcp(const InitMethod& method, const base::Environment& environment, Plan& plan) {
  plan.means = Plan::Means::tcp;
  Address address = tcp_address(method);
  plan.host = std::move(address.host);
  plan.port = address.port;
  check_port(plan, "init_method '" + method.text + "'");
  place_ranks(environment, plan);
  plan.agent = environment.use_agent_store && plan.host == environment.master_addr &&
               plan.port == environment.master_port;
  plan.serve = plan.rank == 0 && !plan.agent;
}

void plan_file(const InitMethod& method, Plan& plan) {
  plan.means = Plan::Means::file;
  plan.path = file_path(method);
}

Plan plan_given_store(const InitOptions& options, const base::Environment& environment) {
  if (!options.rank || !options.world_size) {
    throw UsageError("init_process_group with a store needs .rank and .world_size");
  }
  Plan plan;
  plan.means = Plan::Means::given_store;
  number_ranks(options, environment, {}, plan);
  return plan;
}

Plan make_plan(const InitOptions& options, const base::Environment& environment, bool has_sockets) {
  if (options.store) return plan_given_store(options, environment);
  const InitMethod method = parse_init_method(options.init_method);
  if (method.scheme == "env") check_no_address(method);
  const bool asks_variables = !options.rank && !options.world_size && method.query.empty();
  const bool unlaunched = asks_variables && !environment.rank && !environment.world_size;
  if (asks_variables && !environment.rank && !environment.launched_error.empty()) {
    throw UsageError("init_process_group: " + environment.launched_error);
  }
  Plan plan;
  if (method.scheme == "env" && unlaunched) {
    check_alone(environment);
    return plan;
  }
  if (asks_variables) check_contradiction(environment);
  number_ranks(options, environment, method, plan);
  if (method.scheme == "env") {
    plan_environment(environment, has_sockets, plan);
  } else if (method.scheme == "tcp") {
    plan_tcp(method, environment, plan);
  } else {
    plan_file(method, plan);
  }
  return plan;
}

}  // namespace

Plan plan_rendezvous(const InitOptions& options, const base::Environment& environment,
                     bool has_sockets) {
  Plan plan = make_plan(options, environment, has_sockets);
  const bool has_all_processes = plan.launched && plan.size > 1;
  if (plan.means == Plan::Means::inherited || has_all_processes) {
    check_replacements(environment, options);
  }
  return plan;
}

std::string place_of_keys(const Plan& plan) {
  switch (plan.means) {
    case Plan::Means::given_store:
      return "store";
    case Plan::Means::alone:
      return "alone";
    case Plan::Means::inherited:
      return kInheritedKeys;
    case Plan::Means::local:
      return "local";
    case Plan::Means::tcp:
      return fmt::format("port {}", plan.port);  // the host may have several names
    case Plan::Means::file:
      break;
  }
  std::error_code unreadable;  // then the rendezvous says so
  return "file " + std::filesystem::weakly_canonical(plan.path, unreadable).string();
}

}  // namespace paceline::distributed
