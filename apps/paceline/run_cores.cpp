#include "run_cores.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

#include <paceline/error.h>

#include "base/cores.h"
#include "launch/cpus.h"
#include "launch/omp_threads.h"

namespace paceline::app {
namespace {

// The fewest CPUs that one of the processes has; they are bound.
int least_cpus(const launch::JobSpec& spec) {
  const auto size = [](const std::vector<int>& cpus) { return cpus.size(); };
  return static_cast<int>(std::ranges::min_element(spec.cpus, {}, size)->size());
}

std::string choose_threads(launch::JobSpec& spec, int cores) {
  if (const auto threads = launch::choose_omp_threads(spec, cores)) {
    return plural(*threads, "thread", "threads") + " each";
  }
  return fmt::format("OMP_NUM_THREADS={} each", std::getenv("OMP_NUM_THREADS"));
}

void bind_to_cores(launch::JobSpec& spec, int cores, RunCores& chosen) {
  if (spec.processes > cores) {
    throw UsageError(
        fmt::format("--bind-to-cores: {} processes cannot have cores of their own on {}; "
                    "start fewer, or leave the flag out",
                    spec.processes, plural(cores, "core", "cores")));
  }
  chosen.held = launch::bind_to_cores(base::affinity(), spec.processes);
  if (!chosen.held) {
    chosen.binding = ", not bound to cores: too few are free";
    return;
  }
  spec.cpus = chosen.held->cpus;
  chosen.binding =
      fmt::format(", each on {} of its own", plural(least_cpus(spec), "core", "cores"));
}

std::string describe(launch::NumaBinding binding, int domains, int least) {
  using launch::NumaBinding;
  std::string own;
  if (binding == NumaBinding::exclusive) {
    own = fmt::format("{} of its own on ", plural(least, "core", "cores"));
  }
  const bool one = domains == 1;
  const char* const kind = binding == NumaBinding::socket         ? one ? "socket" : "sockets"
                           : binding == NumaBinding::core_complex ? one ? "cache" : "caches"
                           : one                                  ? "NUMA node"
                                                                  : "NUMA nodes";
  return fmt::format(", each bound to {}{} {}", own,
                     one ? "the only" : fmt::format("one of {}", domains), kind);
}

void bind_to_numa(launch::JobSpec& spec, launch::NumaBinding binding, RunCores& chosen) {
  try {
    auto bound = launch::bind_to_numa(launch::read_cpus(base::affinity()), spec.processes, binding);
    spec.cpus = std::move(bound.cpus);
    chosen.binding = describe(binding, bound.domains, least_cpus(spec));
  } catch (const UsageError& error) {
    throw UsageError(fmt::format("--numa-binding: {}", error.what()));
  }
}

}  // namespace

RunCores choose_cores(RunOptions& options, int cores) {
  RunCores chosen;
  if (options.bind_to_cores) bind_to_cores(options.job, cores, chosen);
  if (options.numa_binding) bind_to_numa(options.job, *options.numa_binding, chosen);
  chosen.threads = choose_threads(options.job, cores);
  return chosen;
}

std::string plural(int count, std::string_view one, std::string_view many) {
  return fmt::format("{} {}", count, count == 1 ? one : many);
}

}  // namespace paceline::app
