#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace paceline::base {

using Getenv = std::function<const char*(const char*)>;

// One of the processes that a launcher other than `paceline run` and torchrun started, as that
// launcher's own variables say.
struct LaunchedProcess {
  std::string launcher;   // "srun", "mpirun"
  std::string variables;  // what was read: "SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=4"

  // Both are set, or neither: the launcher does not say how many processes it started.
  std::optional<int> rank{};
  std::optional<int> size{};
  std::optional<int> node{};  // if it is set, so are the next two
  std::optional<int> local_rank{};
  std::optional<int> local_size{};
  bool needs_launcher = false;  // several ranks are to run here, and none has been started

  // Whether all processes are on this machine and can find each other by `job`.
  bool is_local() const { return size && local_size == size && !job.empty(); }
  // The same for all processes that were started together, or for those on this machine, and no
  // others; empty if there is nothing to tell by.
  std::string job{};
  bool is_job_global = false;         // `job` is the same on all machines
  std::optional<std::string> host{};  // rank 0's
  std::optional<int> port{};          // of rank 0's store, if the launcher chooses one

  bool operator==(const LaunchedProcess&) const = default;
};

// Looks for Open MPI, Hydra (MPICH, Intel MPI), Flux, Slurm's srun, Kubeflow Trainer (PET_*), PMI,
// PMIx, in this order: mpirun decides where srun or flux started it. An Indexed Job of Kubernetes
// decides where WORLD_SIZE is set, RANK is not, and none of them started more than one process.
// Throws UsageError naming a variable that is missing or has an invalid value.
std::optional<LaunchedProcess> find_launched_process(const Getenv& getenv);

// The first host of a list as Slurm writes it: "node[08-11,20],login" is "node08".
std::string first_host(std::string_view list);

// How many tasks a node has in a list as Slurm writes it: of "4(x2),3" nodes 0 and 1 have 4, node 2
// has 3. nullopt for other text.
std::optional<int> tasks_of_node(std::string_view list, int node);

// A port for a job's rendezvous: from 10000 to 29999, below those that systems give to clients.
int port_of_job(std::string_view job);

}  // namespace paceline::base
