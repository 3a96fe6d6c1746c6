// The same training program under every launcher comes to the same parameters.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <deque>
#include <filesystem>
#include <utility>

#include "base/address.h"
#include "launchers/mpirun.h"
#include "launchers/trained.h"
#include "support/rank_here.h"

namespace paceline {
namespace {

namespace fs = std::filesystem;
using test::ChildProcess;
using test::kAllowRoot;
using test::rank_here;
using test::Variables;

constexpr int kRanks = 2;

// A port that nothing uses now.
std::string free_port() {
  const base::UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const base::Address any = base::resolve("127.0.0.1", 0).front();
  EXPECT_EQ(::bind(socket.get(), any.data(), any.size()), 0);
  return std::to_string(base::local_address(socket.get()).port());
}

void expect_trained_by(const std::vector<std::string>& command, const Variables& variables = {}) {
  ChildProcess launcher(command, variables);
  EXPECT_EQ(launcher.wait(), 0) << launcher.err();
  test::expect_trained(launcher.out(), kRanks);
}

// Ranks that something unknown started, each with the variables that `of` returns.
void expect_trained_with(const std::function<Variables(int rank)>& of,
                         const std::string& backend = "paceline") {
  std::deque<ChildProcess> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back(std::vector<std::string>{TRAIN_PROGRAM, backend}, of(rank));
  }
  for (auto& rank : ranks) EXPECT_EQ(rank.wait(), 0) << rank.err();
  test::expect_trained(ranks.front().out(), kRanks);
}

TEST(Launchers, PacelineRun) {
  expect_trained_by({PACELINE_COMMAND, "run", "--nproc-per-node=2", TRAIN_PROGRAM});
  expect_trained_by({PACELINE_COMMAND, "run", "--nproc-per-node=2", TRAIN_PROGRAM, "gloo"});
}

// Gloo names nobody.
TEST(Launchers, PacelineRunNamesWhoFailedOverGloo) {
  const std::map<std::string, std::string> failures{
      {"throws", " failed first: exited with code 1\n  error: no more data\n"},
      {"leaves", " ended early: exited with code 0"}};
  for (const auto& [how, what] : failures) {
    ChildProcess launcher(
        {PACELINE_COMMAND, "run", "--nproc-per-node=3", TRAIN_PROGRAM, "gloo", how});
    EXPECT_EQ(launcher.wait(), 1) << launcher.err();
    EXPECT_THAT(launcher.err(), ::testing::HasSubstr(rank_here(1) + what));
  }
}

TEST(Launchers, SaysOnceWhichVariableIsWrong) {
  ChildProcess rank({TRAIN_PROGRAM}, {{"RANK", "2"}, {"WORLD_SIZE", "2"}});
  EXPECT_EQ(rank.wait(), 1);
  EXPECT_EQ(rank.err(), "paceline error: RANK=2 is not less than WORLD_SIZE=2\n");
}

TEST(Launchers, Spawn) {
  expect_trained_by({TRAIN_PROGRAM, "spawn", "2"});
}

TEST(Launchers, Torchrun) {
  const fs::path torchrun = fs::path(VENV_DIRECTORY) / "bin/torchrun";
  if (!fs::exists(torchrun)) GTEST_SKIP() << "`make python` installs torchrun into .venv";
  expect_trained_by(
      {torchrun, "--no-python", "--nproc-per-node=2", "--master-port", free_port(), TRAIN_PROGRAM});
}

class Mpirun : public ::testing::TestWithParam<const char*> {};

TEST_P(Mpirun, Trains) {
  const std::string name = GetParam();
  const std::string root = fs::path(MPI_DIRECTORY) / name;
  const bool is_package = name.starts_with("mpirun.");
  const std::string mpirun = is_package ? "/usr/bin/" + name : root + "/bin/mpiexec";
  if (!fs::exists(mpirun)) {
    GTEST_SKIP() << (is_package ? "Debian has packages of " : "`make peers` fetches ") << name;
  }
  auto command = test::mpirun(mpirun, name.ends_with("openmpi"));
  command.insert(command.end(), {"-n", "2", TRAIN_PROGRAM});
  if (is_package) return expect_trained_by(command, kAllowRoot);
  // Wheels are not where their libraries were built to be.
  expect_trained_by(command, {{"LD_LIBRARY_PATH", root + "/lib"},
                              {"OPAL_PREFIX", root},
                              {"I_MPI_ROOT", root},
                              {"FI_PROVIDER_PATH", root + "/lib"},
                              {"I_MPI_FABRICS", "shm"},
                              {"I_MPI_PIN", "0"},
                              kAllowRoot[0],
                              kAllowRoot[1]});
}

// Debian has version 4 of Open MPI.
INSTANTIATE_TEST_SUITE_P(OfEachLibrary, Mpirun,
                         ::testing::Values("mpich", "intel_mpi", "openmpi", "mpirun.mpich",
                                           "mpirun.openmpi"),
                         [](const auto& one) {
                           std::string name = one.param;
                           std::ranges::replace(name, '.', '_');
                           return name;
                         });

TEST(Launchers, BareVariables) {
  for (const char* const backend : {"paceline", "gloo"}) {
    const std::string port = free_port();
    expect_trained_with(
        [&](int rank) {
          return Variables{{"RANK", std::to_string(rank)},
                           {"WORLD_SIZE", "2"},
                           {"MASTER_ADDR", "127.0.0.1"},
                           {"MASTER_PORT", port}};
        },
        backend);
  }
}

TEST(Launchers, SlurmsVariables) {
  expect_trained_with([job = fmt::format("{}{}", ::getpid(), free_port())](int rank) {
    return Variables{{"SLURM_JOB_ID", job},
                     {"SLURM_STEP_ID", "0"},
                     {"SLURM_PROCID", std::to_string(rank)},
                     {"SLURM_LOCALID", std::to_string(rank)},
                     {"SLURM_NODEID", "0"},
                     {"SLURM_STEP_NUM_TASKS", "2"},
                     {"SLURM_STEP_NUM_NODES", "1"},
                     {"SLURM_STEP_TASKS_PER_NODE", "2"},
                     {"SLURM_STEP_NODELIST", "localhost"}};
  });
}

TEST(Launchers, VariablesOfKubernetes) {
  const std::string port = free_port();
  // PyTorchJob.
  expect_trained_with([&](int rank) {
    return Variables{{"RANK", std::to_string(rank)},
                     {"WORLD_SIZE", "2"},
                     {"MASTER_ADDR", "localhost"},
                     {"MASTER_PORT", port},
                     {"PYTHONUNBUFFERED", "1"}};
  });
  // Kubeflow Trainer.
  const std::string second = free_port();
  expect_trained_with(
      [&](int rank) {
        return Variables{{"PET_NNODES", "2"},
                         {"PET_NPROC_PER_NODE", "1"},
                         {"PET_NODE_RANK", std::to_string(rank)},
                         {"PET_MASTER_ADDR", "127.0.0.1"},
                         {"PET_MASTER_PORT", second}};
      },
      "gloo");
  // An Indexed Job.
  const std::string third = free_port();
  expect_trained_with([&](int rank) {
    return Variables{{"JOB_COMPLETION_INDEX", std::to_string(rank)},
                     {"WORLD_SIZE", "2"},
                     {"MASTER_ADDR", "127.0.0.1"},
                     {"MASTER_PORT", third}};
  });
}

}  // namespace
}  // namespace paceline
