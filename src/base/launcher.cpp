#include "base/launcher.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/socket.h>
#include <unistd.h>

#include <charconv>
#include <limits>
#include <utility>
#include <vector>

#include <paceline/error.h>

#include "base/environment_reader.h"
#include "base/hash.h"
#include "base/parse.h"
#include "base/process_stat.h"
#include "base/unique_fd.h"

namespace paceline::base {
namespace {

using Process = std::optional<LaunchedProcess>;
using Reader = EnvironmentReader;

// The variables of a launcher, in its own names.
struct Names {
  const char* rank;
  const char* size;
  // Null if the launcher has none.
  const char* local_rank;
  const char* local_size;
};

// Names the variables that are set.
std::string quote(const Reader& read, std::initializer_list<const char*> names) {
  std::string text;
  for (const char* const name : names) {
    const auto value = read.text(name);
    if (value) text += fmt::format("{}{}={}", text.empty() ? "" : ", ", name, *value);
  }
  return text;
}

// Reads what must be there once `names.size` is.
LaunchedProcess read_process(const Reader& read, std::string launcher, const Names& names) {
  LaunchedProcess process{.launcher = std::move(launcher),
                          .variables = quote(read, {names.rank, names.size})};
  process.size = read.integer(names.size, 1);
  process.rank = read.integer(names.rank, 0);
  if (!process.rank) {
    throw UsageError(fmt::format("{} is set, but {} is not: {} sets both", process.variables,
                                 names.rank, process.launcher));
  }
  check_below(names.rank, process.rank, names.size, process.size);
  if (names.local_rank != nullptr) process.local_rank = read.integer(names.local_rank, 0);
  if (names.local_size == nullptr) return process;
  process.local_size = read.integer(names.local_size, 1);
  check_below(names.local_rank, process.local_rank, names.local_size, process.local_size);
  return process;
}

// A field of /proc/PID/stat, by its number in proc(5), from 3 on; empty if there is no such
// process.
std::string stat_field(pid_t pid, int number) {
  const UniqueFd file(::open(fmt::format("/proc/{}/stat", pid).c_str(), O_RDONLY | O_CLOEXEC));
  const std::string stat = file ? read_stat(file.get()) : "";
  std::size_t at = stat.rfind(')');  // ends field 2
  for (int field = 2; field < number && at != std::string::npos; ++field) {
    at = stat.find(' ', at + 1);
  }
  if (at == std::string::npos) return "";
  return stat.substr(at + 1, stat.find(' ', at + 1) - at - 1);
}

bool is_ancestor(pid_t pid) {
  for (pid_t at = ::getppid(); at > 1;) {
    if (at == pid) return true;
    const auto process = stat_of(at);
    at = process ? process->parent : 0;
  }
  return false;
}

// The process that made the pair of sockets to which `fd` belongs: the launcher's on this machine,
// also if a shell is between the two. Empty if that is no ancestor of this process: then `fd` is
// not the launcher's socket any more.
std::string maker_of_socket(int fd) {
  ucred maker{};
  socklen_t size = sizeof(maker);
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &maker, &size) != 0) return "";
  if (!is_ancestor(maker.pid)) return "";
  constexpr int kStart = 22;  // numbers of processes are used again
  return fmt::format("{}/{}", maker.pid, stat_field(maker.pid, kStart));
}

Process find_open_mpi(const Reader& read) {
  if (!read.text("OMPI_COMM_WORLD_SIZE")) return std::nullopt;
  auto process = read_process(read, "mpirun (Open MPI)",
                              {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                               "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"});
  // Version 5, and version 4.
  auto job = read.text("PMIX_NAMESPACE");
  if (!job) job = read.text("OMPI_MCA_ess_base_jobid");
  process.job = job.value_or("");
  process.is_job_global = true;
  return process;
}

Process find_flux(const Reader& read) {
  if (!read.text("FLUX_JOB_SIZE")) return std::nullopt;
  auto process = read_process(read, "flux run",
                              {"FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", nullptr});
  if (read.text("FLUX_JOB_NNODES") == "1") process.local_size = process.size;
  process.job = read.text("FLUX_JOB_ID").value_or("");
  process.is_job_global = true;
  return process;
}

// sbatch alone sets the number of the job's tasks too, but its script is not one of them.
Process find_slurm(const Reader& read) {
  const bool has_step_size = read.text("SLURM_STEP_NUM_TASKS").has_value();
  const char* const size = has_step_size ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
  const auto step = read.text("SLURM_STEP_ID");
  if (!step || !read.text(size)) return std::nullopt;
  // The shell of salloc is a step of one task, and has no rank.
  if (read.text(size) == "1" && !read.text("SLURM_PROCID")) return std::nullopt;
  auto process = read_process(read, "srun", {"SLURM_PROCID", size, "SLURM_LOCALID", nullptr});
  // A shell with a terminal is one process, however many tasks the step has.
  if (read.text("SLURM_PTY_PORT") && *process.size > 1) {
    process.rank.reset();
    process.size.reset();
    return process;
  }
  const auto node = read.integer("SLURM_NODEID", 0);
  const auto tasks = read.text("SLURM_STEP_TASKS_PER_NODE");
  if (node && tasks) process.local_size = tasks_of_node(*tasks, *node);
  if (process.local_size && process.local_rank) process.node = node;
  if (const auto list = read.text("SLURM_STEP_NODELIST")) process.host = first_host(*list);
  if (const auto job = read.text("SLURM_JOB_ID")) process.job = fmt::format("{}.{}", *job, *step);
  process.is_job_global = true;
  return process;
}

// Others set PMI_SIZE too, for an MPI.
Process find_hydra(const Reader& read) {
  if (!read.text("PMI_SIZE") || !read.text("MPI_LOCALNRANKS")) return std::nullopt;
  auto process = read_process(read, "mpirun (Hydra)",
                              {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"});
  const auto job = read.text("I_MPI_HYDRA_UUID");
  process.is_job_global = job.has_value();
  if (job) process.job = *job;
  const auto fd = read.text("PMI_FD");
  int number = -1;
  if (!job && fd) std::from_chars(fd->data(), fd->data() + fd->size(), number);
  if (number >= 0) process.job = maker_of_socket(number);
  return process;
}

// Kubeflow Trainer sets these for torchrun, in each pod.
Process find_kubeflow(const Reader& read) {
  const auto nodes = read.text("PET_NNODES");
  if (!nodes || !read.text("PET_NODE_RANK") || !read.text("PET_MASTER_ADDR")) return std::nullopt;
  LaunchedProcess process{
      .launcher = "Kubeflow Trainer",
      .variables = quote(read, {"PET_NODE_RANK", "PET_NNODES", "PET_NPROC_PER_NODE"})};
  // Several processes in each pod, or a number of nodes that may change, need a launcher.
  // PyTorchJob sets these too, and "auto" without being asked.
  const std::string processes = read.text("PET_NPROC_PER_NODE").value_or("1");
  process.needs_launcher = parse_number(processes, 2, std::numeric_limits<int>::max()).has_value();
  const std::size_t colon = nodes->find(':');
  const bool is_fixed =
      colon == std::string::npos || nodes->substr(0, colon) == nodes->substr(colon + 1);
  if (processes != "1" || !is_fixed) return process;
  process.size = parse_integer("PET_NNODES", std::string_view(*nodes).substr(0, colon), 1);
  process.rank = read.integer("PET_NODE_RANK", 0);
  check_below("PET_NODE_RANK", process.rank, "PET_NNODES", process.size);
  process.node = process.rank;
  process.local_rank = 0;
  process.local_size = 1;
  process.host = read.text("PET_MASTER_ADDR");
  process.port = read.integer("PET_MASTER_PORT", 0, 65535);
  return process;
}

// Some other launcher for MPI.
Process find_pmi(const Reader& read) {
  if (!read.text("PMI_SIZE")) return std::nullopt;
  return read_process(read, "a launcher with PMI",
                      {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", nullptr});
}

// PMIx has no variable for the size.
Process find_pmix(const Reader& read) {
  if (!read.text("PMIX_RANK")) return std::nullopt;
  return LaunchedProcess{.launcher = "a launcher with PMIx",
                         .variables = quote(read, {"PMIX_RANK"})};
}

// Kubernetes numbers the pods, but does not say how many there are. Without that they need not
// belong together.
Process find_indexed_job(const Reader& read) {
  if (read.text("RANK") || !read.text("WORLD_SIZE") || !read.text("JOB_COMPLETION_INDEX")) {
    return std::nullopt;
  }
  return read_process(read, "an Indexed Job of Kubernetes",
                      {"JOB_COMPLETION_INDEX", "WORLD_SIZE", nullptr, nullptr});
}

}  // namespace

Process find_launched_process(const Getenv& getenv) {
  const Reader read(getenv);
  // mpirun in a job of Slurm or Flux starts its daemons by srun or flux, and ranks inherit the
  // variables of these.
  Process found;
  for (const auto find :
       {find_open_mpi, find_hydra, find_flux, find_slurm, find_kubeflow, find_pmi, find_pmix}) {
    if (!found) found = find(read);
  }
  if (found && found->size.value_or(1) > 1) return found;
  Process job = find_indexed_job(read);
  return job ? job : found;
}

std::string first_host(std::string_view list) {
  std::string host;
  for (std::size_t at = 0; at < list.size() && list[at] != ','; ++at) {
    if (list[at] != '[') {
      host += list[at];
      continue;
    }
    const std::size_t end = std::min(list.find(']', at), list.size());
    const std::string_view numbers = list.substr(at + 1, end - at - 1);
    host += numbers.substr(0, numbers.find_first_of("-,"));
    at = end;
  }
  return host;
}

std::optional<int> tasks_of_node(std::string_view list, int node) {
  const char* at = list.data();
  const char* const end = list.data() + list.size();
  const auto number = [&](int& value) {
    const auto [after, error] = std::from_chars(at, end, value);
    at = after;
    return error == std::errc() && value > 0;
  };
  const auto skip = [&](std::string_view text) {
    const bool is_next = std::string_view(at, static_cast<std::size_t>(end - at)).starts_with(text);
    if (is_next) at += text.size();
    return is_next;
  };
  for (int nodes = 0; at != end;) {
    int tasks = 0;
    int times = 1;
    if (!number(tasks)) return std::nullopt;
    if (skip("(x") && (!number(times) || !skip(")"))) return std::nullopt;
    if (node - nodes < times) return tasks;
    nodes += times;
    if (at != end && !skip(",")) return std::nullopt;
  }
  return std::nullopt;
}

int port_of_job(std::string_view job) {
  constexpr int kFirst = 10000;
  constexpr std::uint64_t kPorts = 20000;
  return kFirst + static_cast<int>(hash(job) % kPorts);
}

}  // namespace paceline::base
