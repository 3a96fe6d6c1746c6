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
                    bool first = true) {
  const auto environment = base::parse_environment([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
  try {
    const auto plan = distributed::plan_rendezvous(options, environment, first);
    using Means = distributed::Plan::Means;
    return fmt::format("{} of {} {}", plan.rank, plan.size,
                       plan.means == Means::alone       ? "alone"
                       : plan.means == Means::inherited ? "inherited"
                                                        : "elsewhere");
  } catch (const UsageError& error) {
    return error.what();
  }
}

TEST(Plan, RejectsProcessesOfOtherLaunchers) {
  const struct {
    Variables variables;
    std::string found;
    std::string mapping;
  } refused[] = {
      {{{"OMPI_COMM_WORLD_SIZE", "2"},
        {"OMPI_COMM_WORLD_RANK", "1"},
        {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
        {"PMIX_RANK", "1"}},
       "(OMPI_COMM_WORLD_SIZE=2, OMPI_COMM_WORLD_RANK=1)",
       "RANK=$OMPI_COMM_WORLD_RANK, WORLD_SIZE=$OMPI_COMM_WORLD_SIZE, "
       "LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK, MASTER_ADDR="},
      {{{"PMI_SIZE", "4"}, {"PMI_RANK", "0"}, {"MPI_LOCALRANKID", "0"}},
       "(PMI_SIZE=4, PMI_RANK=0)",
       "RANK=$PMI_RANK, WORLD_SIZE=$PMI_SIZE, LOCAL_RANK=$MPI_LOCALRANKID"},
      {{{"SLURM_STEP_ID", "0"},
        {"SLURM_STEP_NUM_TASKS", "8"},
        {"SLURM_NTASKS", "8"},
        {"SLURM_PROCID", "3"}},
       "(SLURM_STEP_NUM_TASKS=8, SLURM_PROCID=3)",
       "RANK=$SLURM_PROCID, WORLD_SIZE=$SLURM_STEP_NUM_TASKS, LOCAL_RANK=$SLURM_LOCALID"},
      {{{"SLURM_STEP_ID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}},
       "(SLURM_NTASKS=8, SLURM_PROCID=0)",
       "WORLD_SIZE=$SLURM_NTASKS"},
      {{{"PMIX_RANK", "0"}}, "(PMIX_RANK=0)", "RANK=$PMIX_RANK"},
  };
  for (const auto& one : refused) {
    EXPECT_THAT(plan_of(one.variables),
                AllOf(HasSubstr("one of several processes " + one.found), HasSubstr(one.mapping),
                      HasSubstr("paceline run"), HasSubstr("{.world_size = 1, .rank = 0}")));
    EXPECT_EQ(plan_of(one.variables, {.world_size = 1, .rank = 0}), "0 of 1 alone");
    Variables mapped = one.variables;
    mapped.merge(Variables{{"RANK", "1"},
                           {"WORLD_SIZE", "2"},
                           {"MASTER_ADDR", "127.0.0.1"},
                           {"MASTER_PORT", "29500"}});
    EXPECT_EQ(plan_of(mapped), "1 of 2 elsewhere");
  }
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
      {{"OMPI_COMM_WORLD_SIZE", "1"}, {"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}},
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
