// What options and launchers' variables say, and launchers that are not understood.

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/environment.h"
#include "distributed/rendezvous/plan.h"

namespace paceline {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using Variables = std::map<std::string, std::string>;

std::string plan_of(const Variables& variables, const InitOptions& options = {},
                    bool has_sockets = true) {
  const auto environment = base::parse_environment([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
  try {
    const auto plan = distributed::plan_rendezvous(options, environment, has_sockets);
    using Means = distributed::Plan::Means;
    return fmt::format("{} of {} {}", plan.rank, plan.size,
                       plan.means == Means::alone       ? "alone"
                       : plan.means == Means::inherited ? "inherited"
                       : plan.means == Means::local     ? "on this machine"
                                                        : "elsewhere");
  } catch (const UsageError& error) {
    return error.what();
  }
}

// Four processes on two machines; and two on one.
const Variables kMpirun{{"OMPI_COMM_WORLD_SIZE", "4"},       {"OMPI_COMM_WORLD_RANK", "1"},
                        {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                        {"PMIX_NAMESPACE", "a@1"},           {"PMIX_RANK", "1"}};
const Variables kLocalMpirun{{"OMPI_COMM_WORLD_SIZE", "2"},
                             {"OMPI_COMM_WORLD_RANK", "1"},
                             {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                             {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                             {"PMIX_NAMESPACE", "a@1"}};

Variables with(Variables variables, const Variables& more) {
  variables.insert(more.begin(), more.end());
  return variables;
}

TEST(Plan, TakesRanksFromOtherLaunchers) {
  EXPECT_EQ(plan_of(kLocalMpirun), "1 of 2 on this machine");
  EXPECT_EQ(plan_of(with(kLocalMpirun, {{"MASTER_ADDR", "a"}})), "1 of 2 elsewhere");
  EXPECT_EQ(plan_of(with(kMpirun, {{"MASTER_ADDR", "a"}})), "1 of 4 elsewhere");
  EXPECT_EQ(plan_of({{"SLURM_STEP_ID", "0"},
                     {"SLURM_JOB_ID", "1"},
                     {"SLURM_NTASKS", "8"},
                     {"SLURM_PROCID", "3"},
                     {"SLURM_STEP_NODELIST", "a[1-2]"}}),
            "3 of 8 elsewhere");
  EXPECT_EQ(plan_of(kMpirun, {.world_size = 1, .rank = 0}), "0 of 1 alone");
  EXPECT_EQ(plan_of(kMpirun, {.init_method = "file:///x"}), "1 of 4 elsewhere");
}

TEST(Plan, AsksForWhatOtherLaunchersDoNotSay) {
  EXPECT_THAT(plan_of(kMpirun),
              AllOf(HasSubstr("mpirun (Open MPI) started this process as rank 1 of 4 "
                              "(OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=4)"),
                    HasSubstr("set MASTER_ADDR=<rank 0's machine> and MASTER_PORT=")));
  const Variables pod{{"PET_NNODES", "2"}, {"PET_NODE_RANK", "1"}, {"PET_MASTER_ADDR", "a"}};
  EXPECT_THAT(plan_of(pod), HasSubstr("set MASTER_PORT=<a free port on rank 0's machine> too"));
  for (const Variables& unknown :
       {Variables{{"PMIX_RANK", "0"}}, with(pod, {{"PET_NPROC_PER_NODE", "4"}}),
        with(pod, {{"PET_NPROC_PER_NODE", "auto"}})}) {
    EXPECT_THAT(plan_of(unknown),
                AllOf(HasSubstr("as one of several processes ("),
                      HasSubstr("does not say how many there are"), HasSubstr("paceline run"),
                      HasSubstr("{.world_size = 1, .rank = 0}")));
    EXPECT_EQ(plan_of(unknown, {.world_size = 1, .rank = 0}), "0 of 1 alone");
  }
}

// As on clouds that count machines by them.
TEST(Plan, NamesVariablesThatContradictEachOther) {
  const Variables of_machines{
      {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "29500"}};
  EXPECT_THAT(plan_of(with(kMpirun, of_machines)),
              HasSubstr("RANK=0 and WORLD_SIZE=2, but mpirun (Open MPI) started this process with "
                        "OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=4. If they count"));
  // Or as a shell has them from something else.
  EXPECT_THAT(plan_of(with(kMpirun, {{"RANK", "0"}})),
              AllOf(HasSubstr("RANK=0, but mpirun (Open MPI) started"),
                    HasSubstr("unset RANK and WORLD_SIZE; if they are right, set both and ")));
  EXPECT_THAT(plan_of(with(kMpirun, {{"RANK", "0"}, {"WORLD_SIZE", "8"}})),
              AllOf(HasSubstr("needs MASTER_ADDR, the address of rank 0's machine, too; mpirun "),
                    HasSubstr("OMPI_COMM_WORLD_SIZE=4: to use these, unset RANK and WORLD_SIZE")));
  // RANK and WORLD_SIZE count the pods, each of which is to have several ranks.
  const auto pod = [&](const std::string& processes) {
    return with(of_machines, {{"PET_NNODES", "2"},
                              {"PET_NODE_RANK", "0"},
                              {"PET_NPROC_PER_NODE", processes},
                              {"PET_MASTER_ADDR", "a"}});
  };
  EXPECT_THAT(plan_of(pod("4")),
              HasSubstr("RANK=0 and WORLD_SIZE=2, but Kubeflow Trainer started this process with "
                        "PET_NODE_RANK=0, PET_NNODES=2, PET_NPROC_PER_NODE=4. If they count "
                        "machines, or are left from something else, start the program with "
                        "`paceline run`; if they are right, set LOCAL_RANK too"));
  EXPECT_EQ(plan_of(with(pod("4"), {{"LOCAL_RANK", "0"}})), "0 of 2 elsewhere");
  // As PyTorchJob sets them by default.
  EXPECT_EQ(plan_of(pod("auto")), "0 of 2 elsewhere");
  // A launcher that does not say how many ranks there are contradicts nothing.
  EXPECT_EQ(plan_of(with(of_machines, {{"PMIX_RANK", "0"}})), "0 of 2 elsewhere");
  // A program that starts ranks by itself, under any launcher: more ranks than that one knows, or
  // with their places.
  for (const Variables& more :
       {Variables{{"OMPI_COMM_WORLD_SIZE", "1"}, {"OMPI_COMM_WORLD_RANK", "0"}},
        with(kMpirun, {{"LOCAL_RANK", "0"}}), with(kMpirun, {{"TORCHELASTIC_RUN_ID", "x"}})}) {
    EXPECT_EQ(plan_of(with(of_machines, more)), "0 of 2 elsewhere");
  }
  EXPECT_EQ(
      plan_of(with(
          kMpirun,
          {{"RANK", "7"}, {"WORLD_SIZE", "8"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "29500"}})),
      "7 of 8 elsewhere");
}

TEST(Plan, NamesVariablesOfALauncherThatMakeNoSense) {
  const Variables half{{"PMI_SIZE", "2"}};
  EXPECT_THAT(plan_of(half), HasSubstr("PMI_SIZE=2 is set, but PMI_RANK is not"));
  EXPECT_EQ(plan_of(half, {.world_size = 1, .rank = 0}), "0 of 1 alone");
  EXPECT_THAT(plan_of({{"JOB_COMPLETION_INDEX", "4"}, {"WORLD_SIZE", "4"}}),
              HasSubstr("JOB_COMPLETION_INDEX=4 is not less than WORLD_SIZE=4"));
}

TEST(Plan, PodsOfAnIndexedJobMayHaveALauncherForThemselves) {
  const Variables pod{{"JOB_COMPLETION_INDEX", "1"},
                      {"WORLD_SIZE", "2"},
                      {"MASTER_ADDR", "a"},
                      {"MASTER_PORT", "29500"}};
  for (const Variables& more : {Variables{},
                                {{"OMPI_COMM_WORLD_SIZE", "1"}, {"OMPI_COMM_WORLD_RANK", "0"}},
                                {{"PMIX_RANK", "0"}},
                                {{"PET_NNODES", "1"},
                                 {"PET_NODE_RANK", "0"},
                                 {"PET_MASTER_ADDR", "b"},
                                 {"PET_NPROC_PER_NODE", "auto"}}}) {
    EXPECT_EQ(plan_of(with(pod, more)), "1 of 2 elsewhere");
  }
  Variables without_address = with(pod, {{"RANK", "1"}});
  without_address.erase("MASTER_ADDR");
  EXPECT_EQ(plan_of(without_address),
            "env:// with RANK and WORLD_SIZE needs MASTER_ADDR, the address of rank 0's machine, "
            "too");
}

TEST(Plan, AcceptsASingleProcessOfAnotherLauncher) {
  const Variables alone[] = {
      {},
      {{"OMPI_COMM_WORLD_SIZE", "1"}, {"OMPI_COMM_WORLD_RANK", "0"}, {"PMIX_RANK", "0"}},
      {{"PMI_SIZE", "1"}, {"PMI_RANK", "0"}},
      // A script of sbatch, in which no step has begun; and the shell of salloc.
      {{"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}, {"SLURM_JOB_ID", "7"}},
      {{"SLURM_NTASKS", "8"}, {"SLURM_STEP_ID", "4294967290"}, {"SLURM_STEP_NUM_TASKS", "1"}},
      // mpirun has one process on each of its nodes, on which srun started its daemons.
      {{"OMPI_COMM_WORLD_SIZE", "1"},
       {"OMPI_COMM_WORLD_RANK", "0"},
       {"SLURM_STEP_ID", "0"},
       {"SLURM_STEP_NUM_TASKS", "2"}},
      // A pod of an Indexed Job whose pods do not belong together.
      {{"JOB_COMPLETION_INDEX", "3"}},
  };
  for (const Variables& variables : alone) EXPECT_EQ(plan_of(variables), "0 of 1 alone");
}

TEST(Plan, WorldsOfMoreRanksThanErrorsCanNameAreRefused) {
  EXPECT_EQ(plan_of({}, {.init_method = "file:///x", .world_size = 1024, .rank = 1023}),
            "1023 of 1024 elsewhere");
  EXPECT_EQ(plan_of({}, {.init_method = "file:///x", .world_size = 1025, .rank = 0}),
            "a world of 1025 ranks: 1 to 1024 are allowed");
}

TEST(Plan, RejectsRanksThatCannotBe) {
  EXPECT_EQ(plan_of({}, {.init_method = "file:///x?rank=0&world_size=0"}),
            "a world of 0 ranks: 1 to 1024 are allowed");
  EXPECT_EQ(plan_of({}, {.init_method = "file:///x", .world_size = 2, .rank = 2}),
            "rank 2 of a world of 2: ranks run from 0 to 1");
}

TEST(Plan, ReadsTheQueryOfEveryInitMethod) {
  const Variables address{{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}};
  for (const std::string start : {"env://", "tcp://127.0.0.1:29500", "file:///x"}) {
    EXPECT_EQ(plan_of(address, {.init_method = start + "?rank=1&world_size=2"}),
              "1 of 2 elsewhere");
    EXPECT_THAT(plan_of(address, {.init_method = start + "?rank=1"}),
                HasSubstr("does not know the world_size"));
  }
  EXPECT_THAT(plan_of({}, {.init_method = "env://?rank=0&world_size=2"}),
              HasSubstr("needs MASTER_ADDR"));
}

TEST(Plan, RejectsUnknownMethods) {
  // With or without a rank.
  for (const char* const method : {"tcpx://127.0.0.1:29500", "127.0.0.1:29500", ""}) {
    EXPECT_THAT(plan_of({}, {.init_method = method}), HasSubstr("is none of env://"));
    EXPECT_THAT(plan_of({}, {.init_method = method, .world_size = 2, .rank = 0}),
                HasSubstr("is none of env://"));
  }
}

TEST(Plan, RejectsAnAddressInEnv) {
  EXPECT_THAT(plan_of({}, {.init_method = "env://127.0.0.1:29500"}),
              HasSubstr("'env://127.0.0.1:29500': env:// takes its address from MASTER_ADDR"));
}

TEST(Plan, RejectsAPortThatOtherRanksCannotLearn) {
  EXPECT_THAT(plan_of({}, {.init_method = "tcp://127.0.0.1:0", .world_size = 2, .rank = 0}),
              HasSubstr("'tcp://127.0.0.1:0': port 0 stands for any free port"));
  EXPECT_THAT(
      plan_of(
          {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "0"}}),
      HasSubstr("MASTER_PORT=0: port 0 stands for any free port"));
  EXPECT_EQ(plan_of({}, {.init_method = "tcp://127.0.0.1:0", .world_size = 1, .rank = 0}),
            "0 of 1 elsewhere");
}

TEST(Plan, ProcessesAreReplacedOnlyInAWorldThatReconfigures) {
  const Variables launched{{"RANK", "1"},
                           {"WORLD_SIZE", "2"},
                           {"PACELINE_MAX_REPLACEMENTS", "3"},
                           {"PACELINE_STORE_FD", "6"}};
  EXPECT_EQ(plan_of(launched, {.enable_reconfigure = true}), "1 of 2 inherited");
  EXPECT_EQ(plan_of(launched, {.world_size = 1, .rank = 0}), "0 of 1 alone");
  for (const char* const method : {"env://", "tcp://127.0.0.1:4711", "file:///x"}) {
    EXPECT_THAT(
        plan_of(launched, {.init_method = method}),
        AllOf(HasSubstr("`paceline run --max-replacements 3`"), HasSubstr(".enable_reconfigure")));
  }
  EXPECT_EQ(plan_of(launched, {.init_method = "file:///x", .world_size = 1, .rank = 0}),
            "0 of 1 elsewhere");
}

TEST(Plan, KnowsTheLaunchersStoreByItsAddress) {
  const auto environment = base::parse_environment([](const char* name) -> const char* {
    static const Variables agent{{"RANK", "0"},
                                 {"WORLD_SIZE", "2"},
                                 {"MASTER_ADDR", "node0"},
                                 {"MASTER_PORT", "4711"},
                                 {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
    const auto found = agent.find(name);
    return found == agent.end() ? nullptr : found->second.c_str();
  });
  const auto serves = [&](const char* method) {
    return distributed::plan_rendezvous({.init_method = method}, environment, false).serve;
  };
  EXPECT_FALSE(serves("env://"));
  EXPECT_FALSE(serves("tcp://node0:4711"));
  EXPECT_TRUE(serves("tcp://node0:4712"));
}

TEST(Plan, KnowsWhetherRanksAreOnOtherMachines) {
  for (const char* const method : {"env://", "tcp://node0:4711"}) {
    const auto machines = [&](const Variables& local) {
      const Variables variables = with(
          {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "node0"}, {"MASTER_PORT", "4711"}},
          local);
      const auto environment = base::parse_environment([&](const char* name) -> const char* {
        const auto found = variables.find(name);
        return found == variables.end() ? nullptr : found->second.c_str();
      });
      const auto plan = distributed::plan_rendezvous({.init_method = method}, environment, false);
      return std::string(plan.several_machines ? "several" : plan.one_machine ? "one" : "unknown");
    };
    EXPECT_EQ(machines({}), "unknown");
    EXPECT_EQ(machines({{"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "1"}}), "several");
    EXPECT_EQ(machines({{"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "2"}}), "one");
  }
}

TEST(Plan, RejectsRanksThatPacelineRunDidNotStart) {
  const Variables launched{{"RANK", "1"},
                           {"WORLD_SIZE", "2"},
                           {"PACELINE_BOOTSTRAP_SOCKETS", "5"},
                           {"PACELINE_STORE_FD", "6"}};
  EXPECT_EQ(plan_of(launched), "1 of 2 inherited");
  EXPECT_EQ(plan_of(launched, {.world_size = 2, .rank = 1}), "1 of 2 inherited");
  EXPECT_EQ(plan_of(launched, {.world_size = 1, .rank = 0}), "0 of 1 alone");
  for (const auto& [options, asked] : std::vector<std::pair<InitOptions, std::string>>{
           {{.world_size = 3}, "rank 1 of 3"}, {{.world_size = 2, .rank = 0}, "rank 0 of 2"}}) {
    EXPECT_THAT(plan_of(launched, options),
                AllOf(HasSubstr("was asked for " + asked),
                      HasSubstr("started this process as rank 1 of 2 (RANK, WORLD_SIZE)")));
  }
  // Survivors meet again in the store, with ranks of their own.
  EXPECT_EQ(plan_of(launched, {.world_size = 3}, false), "1 of 3 inherited");
}

}  // namespace
}  // namespace paceline
