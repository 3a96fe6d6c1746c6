#include "base/launcher.h"

#include <gmock/gmock.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <iostream>
#include <map>
#include <string>

#include <paceline/error.h>

#include "base/environment.h"

namespace paceline::base {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using Variables = std::map<std::string, std::string>;

Getenv from(const Variables& variables) {
  return [&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  };
}

std::optional<LaunchedProcess> find(const Variables& variables) {
  return find_launched_process(from(variables));
}

// What version 5 sets on one machine.
const Variables kOpenMpi{{"OMPI_COMM_WORLD_RANK", "1"},       {"OMPI_COMM_WORLD_SIZE", "4"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                         {"PMIX_NAMESPACE", "prterun-a-5@1"}, {"PMIX_RANK", "1"}};
// The third of seven tasks on three nodes, which is the first on its own.
const Variables kSlurm{{"SLURM_STEP_ID", "2"},
                       {"SLURM_JOB_ID", "17"},
                       {"SLURM_NTASKS", "9"},
                       {"SLURM_STEP_NUM_TASKS", "7"},
                       {"SLURM_PROCID", "2"},
                       {"SLURM_LOCALID", "0"},
                       {"SLURM_NODEID", "1"},
                       {"SLURM_STEP_TASKS_PER_NODE", "2(x2),3"},
                       {"SLURM_STEP_NODELIST", "n[007-008,12]"}};
const Variables kHydra{
    {"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "2"}};
const Variables kFlux{{"FLUX_TASK_RANK", "3"},  {"FLUX_JOB_SIZE", "4"}, {"FLUX_TASK_LOCAL_ID", "3"},
                      {"FLUX_JOB_NNODES", "1"}, {"FLUX_JOB_ID", "f9"},  {"PMI_RANK", "3"},
                      {"PMI_SIZE", "4"}};
const Variables kKubeflow{{"PET_NNODES", "3"},
                          {"PET_NODE_RANK", "2"},
                          {"PET_NPROC_PER_NODE", "1"},
                          {"PET_MASTER_ADDR", "pod-0.svc"},
                          {"PET_MASTER_PORT", "29400"}};

Variables with(Variables variables, const Variables& changes) {
  for (const auto& [name, value] : changes) variables[name] = value;
  return variables;
}

TEST(Launcher, ReadsOpenMpi) {
  const auto found = find(kOpenMpi);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->launcher, "mpirun (Open MPI)");
  EXPECT_EQ(found->variables, "OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=4");
  EXPECT_EQ(found->rank, 1);
  EXPECT_EQ(found->size, 4);
  EXPECT_EQ(found->local_rank, 1);
  EXPECT_EQ(found->job, "prterun-a-5@1");
  EXPECT_TRUE(found->is_local());
  EXPECT_FALSE(find(with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}))->is_local());
  EXPECT_FALSE(find(with(kOpenMpi, {{"PMIX_NAMESPACE", ""}}))->is_local());
}

TEST(Launcher, ReadsAStepOfSlurm) {
  const auto found = find(kSlurm);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->variables, "SLURM_PROCID=2, SLURM_STEP_NUM_TASKS=7");
  EXPECT_EQ(found->rank, 2);
  EXPECT_EQ(found->size, 7);
  EXPECT_EQ(found->node, 1);
  EXPECT_EQ(found->local_rank, 0);
  EXPECT_EQ(found->local_size, 2);
  EXPECT_EQ(found->host, "n007");
  EXPECT_EQ(found->job, "17.2");
  // A job's script, in which no step has begun, and the shell of salloc.
  EXPECT_FALSE(find({{"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}, {"SLURM_JOB_ID", "7"}}));
  EXPECT_FALSE(find({{"SLURM_STEP_ID", "4294967290"}, {"SLURM_STEP_NUM_TASKS", "1"}}));
  // A shell with a terminal; its step's other tasks have ended.
  EXPECT_EQ(find(with(kSlurm, {{"SLURM_PTY_PORT", "40000"}}))->size, std::nullopt);
}

TEST(Launcher, ReadsFluxAndKubeflow) {
  const auto flux = find(kFlux);
  ASSERT_TRUE(flux);
  EXPECT_EQ(flux->launcher, "flux run");
  EXPECT_EQ(flux->rank, 3);
  EXPECT_TRUE(flux->is_local());
  EXPECT_FALSE(find(with(kFlux, {{"FLUX_JOB_NNODES", "2"}}))->is_local());

  const auto pod = find(kKubeflow);
  ASSERT_TRUE(pod);
  EXPECT_EQ(pod->rank, 2);
  EXPECT_EQ(pod->size, 3);
  EXPECT_EQ(pod->local_size, 1);
  EXPECT_EQ(pod->host, "pod-0.svc");
  EXPECT_EQ(pod->port, 29400);
  // These need a launcher in the pod.
  EXPECT_FALSE(find(with(kKubeflow, {{"PET_NPROC_PER_NODE", "4"}}))->size);
  EXPECT_FALSE(find(with(kKubeflow, {{"PET_NNODES", "1:4"}}))->size);
  EXPECT_EQ(find(with(kKubeflow, {{"PET_NNODES", "3:3"}}))->size, 3);
  // These are for paceline run or torchrun.
  EXPECT_FALSE(find({{"PET_NNODES", "1:1"}, {"PET_NPROC_PER_NODE", "2"}}));
}

// Hydra does not name its job, but each process inherits a socket of it.
TEST(Launcher, FindsTheJobOfHydraByItsSocket) {
  const auto found = find(kHydra);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->job, "");
  EXPECT_FALSE(found->is_local());
  EXPECT_EQ(find(with(kHydra, {{"I_MPI_HYDRA_UUID", "4e16"}}))->job, "4e16");
  std::array<int, 2> ends{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()), 0);
  const auto job_of = [](const std::string& fd) {
    return find(with(kHydra, {{"PMI_FD", fd}}))->job;
  };
  // Not of a socket that is the process's own, nor of anything else.
  for (const std::string& bad :
       {std::to_string(ends[0]), std::string("-1"), std::string("x"), std::string("1000000")}) {
    EXPECT_EQ(job_of(bad), "") << bad;
  }
  const std::string launcher = std::to_string(::getpid()) + "/";
  std::cout.flush();
  const pid_t child = ::fork();
  if (child == 0) {
    const std::string job = job_of(std::to_string(ends[1]));
    ::_exit(job.starts_with(launcher) && job == job_of(std::to_string(ends[0])) ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  for (const int end : ends) ::close(end);
}

// mpirun starts its daemons by srun or flux, whose variables ranks inherit.
TEST(Launcher, MpirunDecidesWhereAnotherLauncherStartedIt) {
  Variables all = kOpenMpi;
  for (const Variables& more : {kHydra, kFlux, kSlurm, kKubeflow})
    all.insert(more.begin(), more.end());
  EXPECT_EQ(find(all)->launcher, "mpirun (Open MPI)");
  for (const auto& [name, value] : kOpenMpi) all.erase(name);
  EXPECT_EQ(find(all)->launcher, "mpirun (Hydra)");
  all.erase("MPI_LOCALNRANKS");  // then PMI_SIZE is flux's or srun's
  EXPECT_EQ(find(all)->launcher, "flux run");
  all.erase("FLUX_JOB_SIZE");
  EXPECT_EQ(find(all)->launcher, "srun");
  all.erase("SLURM_STEP_ID");
  EXPECT_EQ(find(all)->launcher, "Kubeflow Trainer");
  all.erase("PET_NNODES");
  EXPECT_EQ(find(all)->launcher, "a launcher with PMI");
  EXPECT_EQ(find({{"PMIX_RANK", "1"}})->size, std::nullopt);
  EXPECT_FALSE(find({}));
  // A shell of one task, in which mpirun starts four.
  const Variables shell{
      {"SLURM_STEP_ID", "4"}, {"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_PROCID", "0"}};
  EXPECT_EQ(find(with(shell, with(kHydra, {{"PMI_SIZE", "4"}})))->size, 4);
}

TEST(Launcher, NamesWhatIsWrong) {
  const auto says = [](const char* text) { return ThrowsMessage<UsageError>(HasSubstr(text)); };
  EXPECT_THAT(
      [&] {
        find(with(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", ""}}));
      },
      says("OMPI_COMM_WORLD_SIZE=4 is set, but OMPI_COMM_WORLD_RANK is not"));
  EXPECT_THAT(
      [&] {
        find(with(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "4"}}));
      },
      says("OMPI_COMM_WORLD_RANK=4 is not less than OMPI_COMM_WORLD_SIZE=4"));
  EXPECT_THAT(
      [&] {
        find(with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_RANK", "9"}}));
      },
      says("OMPI_COMM_WORLD_LOCAL_RANK=9 is not less than OMPI_COMM_WORLD_LOCAL_SIZE=4"));
  EXPECT_THAT([&] { find(with(kSlurm, {{"SLURM_PROCID", "a"}})); }, says("SLURM_PROCID=a is not"));
  EXPECT_THAT([&] { find(with(kHydra, {{"PMI_SIZE", "0"}})); }, says("PMI_SIZE=0 is not"));
}

TEST(Launcher, ReadsListsOfHosts) {
  EXPECT_EQ(first_host("node08"), "node08");
  EXPECT_EQ(first_host("node08,login"), "node08");
  EXPECT_EQ(first_host("node[08-11,20],login"), "node08");
  EXPECT_EQ(first_host("r[1-2]n[3,5]-ib,x"), "r1n3-ib");
  EXPECT_EQ(first_host("node[7"), "node7");
  EXPECT_EQ(first_host(""), "");
}

TEST(Launcher, ReadsListsOfTasks) {
  for (const auto& [node, tasks] : {std::pair{0, 4}, {1, 4}, {2, 3}, {3, 12}}) {
    EXPECT_EQ(tasks_of_node("4(x2),3,12", node), tasks) << node;
  }
  EXPECT_EQ(tasks_of_node("4(x2),3", 3), std::nullopt);
  for (const char* const bad :
       {"", "x", "4(x", "4(x2", "4(y2)", "4,,3", "0", "-1", "4(x0),2", "99999999999"}) {
    EXPECT_EQ(tasks_of_node(bad, 1), std::nullopt) << bad;
  }
}

TEST(Launcher, ChoosesAPortForEachJob) {
  const int port = port_of_job("17.2");
  EXPECT_EQ(port_of_job("17.2"), port);
  EXPECT_NE(port_of_job("17.3"), port);
  for (int job = 0; job < 1000; ++job) {
    const int other = port_of_job(std::to_string(job));
    EXPECT_GE(other, 10000);
    EXPECT_LT(other, 30000);
  }
}

TEST(Launcher, StandsInForMissingVariables) {
  const auto environment = [](const Variables& variables) {
    return parse_environment(from(variables));
  };
  const Environment slurm = environment(kSlurm);
  EXPECT_TRUE(slurm.numbered_by_launched);
  EXPECT_EQ(slurm.rank, 2);
  EXPECT_EQ(slurm.world_size, 7);
  EXPECT_EQ(slurm.node_rank, 1);
  EXPECT_EQ(slurm.local_world_size, 2);
  EXPECT_EQ(slurm.master_addr, "n007");
  EXPECT_EQ(slurm.master_port, port_of_job("17.2"));
  // Processes of one machine need no address.
  EXPECT_EQ(environment(kOpenMpi).master_addr, std::nullopt);

  const Variables bare{{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}};
  const Environment set = environment(with(kSlurm, bare));
  EXPECT_FALSE(set.numbered_by_launched);
  EXPECT_EQ(set.rank, 1);
  EXPECT_EQ(set.world_size, 2);
  EXPECT_EQ(set.local_world_size, std::nullopt);
  EXPECT_TRUE(set.launched);
  EXPECT_EQ(environment(with(kSlurm, {{"MASTER_ADDR", "b"}, {"MASTER_PORT", "5"}})).master_addr,
            "b");
  // Variables that make no sense trouble only those who need them.
  const Environment broken = environment(with(kSlurm, {{"SLURM_PROCID", "x"}}));
  EXPECT_FALSE(broken.rank);
  EXPECT_THAT(broken.launched_error, HasSubstr("SLURM_PROCID=x is not"));
  // WORLD_SIZE may say the same.
  EXPECT_EQ(environment(with(kSlurm, {{"WORLD_SIZE", "7"}})).rank, 2);
  EXPECT_FALSE(environment(with(kSlurm, {{"WORLD_SIZE", "8"}})).rank);
  // The places of the launcher, or the given ones; no mixture.
  EXPECT_EQ(environment(with(kSlurm, {{"LOCAL_RANK", "5"}})).local_world_size, std::nullopt);
  // torchrun and paceline run know better.
  EXPECT_FALSE(environment(with(kSlurm, {{"TORCHELASTIC_RUN_ID", "x"}})).launched);
}

TEST(Launcher, TakesTheRankOfAnIndexedJob) {
  const auto rank_of = [](const Variables& variables) {
    return parse_environment(from(variables)).rank;
  };
  EXPECT_EQ(rank_of({{"JOB_COMPLETION_INDEX", "3"}, {"WORLD_SIZE", "4"}}), 3);
  EXPECT_EQ(rank_of({{"JOB_COMPLETION_INDEX", "3"}, {"WORLD_SIZE", "4"}, {"RANK", "1"}}), 1);
  // Pods of such a job need not belong together.
  EXPECT_EQ(rank_of({{"JOB_COMPLETION_INDEX", "3"}}), std::nullopt);
  const Environment job =
      parse_environment(from({{"JOB_COMPLETION_INDEX", "3"}, {"WORLD_SIZE", "4"}}));
  EXPECT_TRUE(job.numbered_by_launched);
  EXPECT_EQ(job.launched->launcher, "an Indexed Job of Kubernetes");
  EXPECT_EQ(job.launched->variables, "JOB_COMPLETION_INDEX=3, WORLD_SIZE=4");
  const Environment broken =
      parse_environment(from({{"JOB_COMPLETION_INDEX", "4"}, {"WORLD_SIZE", "4"}}));
  EXPECT_FALSE(broken.rank);
  EXPECT_THAT(broken.launched_error,
              HasSubstr("JOB_COMPLETION_INDEX=4 is not less than WORLD_SIZE=4"));
}

}  // namespace
}  // namespace paceline::base
