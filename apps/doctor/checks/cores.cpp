#include <fmt/format.h>

#include <cstdint>
#include <set>
#include <string>
#include <utility>

#include "base/number_list.h"
#include "checks/checks.h"
#include "checks/units.h"
#include "shm/collectives/fingerprint.h"

namespace paceline::doctor {
namespace {

Check check_available(const CoreFacts& facts) {
  Check check{
      .name = "available",
      .text = fmt::format("{} of {} (CPU {})", facts.available,
                          plural(facts.online, "core", "cores"), base::list_text(facts.affinity)),
      .values = {{"cores", facts.available},
                 {"online", facts.online},
                 {"affinity", facts.affinity},
                 {"control_group_cores", nullptr}}};
  if (facts.quota > 0) {
    check.values["control_group_cores"] = facts.quota;
    check.text += fmt::format(", the control group's CPU limit is {}", facts.quota);
  }
  if (facts.available == 1) {
    check.status = Status::warning;
    check.text += ": several ranks take turns on it, and training is no faster than on one rank";
    check.advice = "use a machine with more cores, or raise the affinity or the CPU limit";
  }
  return check;
}

struct Topology {
  int cores = 0;  // physical
  int sockets = 0;
  int nodes = 0;
};

Topology count(const std::vector<launch::Cpu>& cpus) {
  std::set<std::pair<int, int>> cores;
  std::set<int> sockets;
  std::set<int> nodes;
  for (const launch::Cpu& cpu : cpus) {
    cores.insert({cpu.package, cpu.core});
    sockets.insert(cpu.package);
    nodes.insert(cpu.node);
  }
  return {static_cast<int>(cores.size()), static_cast<int>(sockets.size()),
          static_cast<int>(nodes.size())};
}

Check check_topology(const CoreFacts& facts, const Topology& topology) {
  std::string text =
      fmt::format("{}, {}, {}", plural(topology.cores, "physical core", "physical cores"),
                  plural(topology.sockets, "socket", "sockets"),
                  plural(topology.nodes, "NUMA node", "NUMA nodes"));
  const auto threads = static_cast<int>(facts.cpus.size());
  if (threads > topology.cores) text += fmt::format("; {} hyper-threads", threads);
  return {.name = "topology",
          .text = std::move(text),
          .values = {{"physical_cores", topology.cores},
                     {"threads", threads},
                     {"sockets", topology.sockets},
                     {"numa_nodes", topology.nodes}}};
}

Check check_auto(const CoreFacts& facts) {
  const int processes = auto_processes(facts);
  const std::string& chosen = facts.omp_num_threads;
  const std::string threads = chosen.empty() ? "1 thread" : "OMP_NUM_THREADS=" + chosen;
  Check check{
      .name = "auto",
      .text = fmt::format("`paceline run --nproc-per-node auto` starts {}, {} each",
                          plural(processes, "process", "processes"), threads),
      .values = {{"processes", processes}, {"omp_num_threads", chosen.empty() ? "1" : chosen}}};
  if (processes > shm::kMaxRanks) {
    check.status = Status::warning;
    check.text += fmt::format(", but the backend paceline has at most {} ranks", shm::kMaxRanks);
    check.advice = fmt::format("give a number: --nproc-per-node {}", shm::kMaxRanks);
  } else if (const std::int64_t all = std::int64_t{thread_count(chosen).value_or(1)} * processes;
             all > facts.available) {
    check.status = Status::warning;
    check.text += fmt::format(": {} threads on {}, which wait for each other in every operator",
                              all, plural(facts.available, "core", "cores"));
    check.advice =
        "unset OMP_NUM_THREADS, so that `paceline run` gives each process its share, or "
        "start fewer processes";
  }
  return check;
}

}  // namespace

Group check_cores(const CoreFacts& facts) {
  return {"cores",
          {check_available(facts), check_topology(facts, count(facts.cpus)), check_auto(facts)}};
}

}  // namespace paceline::doctor
