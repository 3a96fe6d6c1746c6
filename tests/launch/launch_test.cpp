#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <optional>
#include <thread>
#include <utility>

#include "base/pipe.h"
#include "base/unique_fd.h"
#include "launch/job.h"
#include "launch/log_directory.h"
#include "launch/process_tree.h"
#include "launch/program.h"
#include "launch/signal_names.h"
#include "launch/worker_environment.h"
#include "support/eventually.h"
#include "support/temporary_directory.h"

namespace paceline::launch {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;
using ::testing::StartsWith;

TEST(SignalNames, HaveANameOrANumber) {
  EXPECT_EQ(signal_name(SIGKILL), "SIGKILL");
  EXPECT_EQ(signal_name(SIGBUS), "SIGBUS");
  EXPECT_EQ(signal_name(40), "signal 40");
  EXPECT_THAT(std::string(signal_meaning(SIGKILL)), HasSubstr("out-of-memory"));
  EXPECT_EQ(signal_meaning(SIGUSR1), "");
}

TEST(Descendants, FindsGrandchildrenWhileOthersVanish) {
  const auto [reader, writer] = base::make_pipe();
  // A child with one child that stays, and others that live for a moment only: each of those may
  // end between any two steps of a walk.
  const pid_t child = ::fork();
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    const pid_t staying = ::fork();
    if (staying == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      for (;;) ::pause();
    }
    if (::write(writer.get(), &staying, sizeof(staying)) != sizeof(staying)) ::_exit(1);
    for (;;) {
      const pid_t passing = ::fork();
      if (passing == 0) ::_exit(0);
      ::waitpid(passing, nullptr, 0);
    }
  }
  pid_t staying = 0;
  ASSERT_EQ(::read(reader.get(), &staying, sizeof(staying)), ssize_t{sizeof(staying)});
  for (int walk = 0; walk < 50; ++walk) {
    const auto found = descendants(::getpid());
    EXPECT_TRUE(std::any_of(found.begin(), found.end(), [&](const Process& process) {
      return process.pid == staying && process.parent == child;
    }));
  }
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

TEST(WorkerEnvironment, TorchrunsVariablesReplaceInheritedOnes) {
  JobSpec spec;
  spec.processes = 3;
  spec.environment = {{"OMP_NUM_THREADS", "4"}, {"RANK", "99"}};
  const JobIdentity job{"id", 1234, "/d"};
  const char* const inherited[] = {"HOME=/h=x",
                                   "RANK=7",
                                   "TORCHELASTIC_USE_AGENT_STORE=True",
                                   "PACELINE_BOOTSTRAP_SOCKETS=9",
                                   "PACELINE_TERMINAL=5",
                                   "PACELINE_SPAWN=1,2",
                                   "PACELINE_ERROR_FD=7",
                                   "broken",
                                   nullptr};
  EXPECT_THAT(
      worker_environment(spec, job, 0, {5, 6}, 8, inherited),
      ElementsAre("GROUP_RANK=0", "GROUP_WORLD_SIZE=1", "HOME=/h=x", "LOCAL_RANK=0",
                  "LOCAL_WORLD_SIZE=3", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=1234",
                  "OMP_NUM_THREADS=4", "PACELINE_BOOTSTRAP_SOCKETS=5,6", "PACELINE_STORE_FD=8",
                  "RANK=0", "ROLE_NAME=default", "ROLE_RANK=0", "ROLE_WORLD_SIZE=3",
                  "TORCHELASTIC_ERROR_FILE=/d/0/error.json", "TORCHELASTIC_MAX_RESTARTS=0",
                  "TORCHELASTIC_RESTART_COUNT=0", "TORCHELASTIC_RUN_ID=id",
                  "TORCH_NCCL_ASYNC_ERROR_HANDLING=1", "WORLD_SIZE=3"));
  const auto second = worker_environment(spec, job, 2, {7}, 8, inherited);
  EXPECT_THAT(second, Contains("RANK=2"));
  EXPECT_THAT(second, Contains("PACELINE_BOOTSTRAP_SOCKETS=7"));
}

// What torchrun 2.15 sets; see _set_local_rank_env in its local_elastic_agent.py.
TEST(WorkerEnvironment, VirtualLocalRanksSeeTheirOwnDevice) {
  JobSpec spec;
  spec.processes = 3;
  spec.virtual_local_rank = true;
  const JobIdentity job{"id", 1234, "/d"};
  const auto environment = [&](int rank, std::vector<const char*> inherited) {
    inherited.push_back(nullptr);
    return worker_environment(spec, job, rank, {}, 8, inherited.data());
  };
  EXPECT_THAT(environment(2, {}), IsSupersetOf({"LOCAL_RANK=0", "RANK=2", "LOCAL_WORLD_SIZE=3",
                                                "CUDA_VISIBLE_DEVICES=2"}));
  EXPECT_THAT(environment(1, {"CUDA_VISIBLE_DEVICES=5, GPU-7 ,9"}),
              Contains("CUDA_VISIBLE_DEVICES=GPU-7"));
  EXPECT_THAT(environment(0, {"CUDA_VISIBLE_DEVICES="}), Contains("CUDA_VISIBLE_DEVICES="));
  EXPECT_THAT(environment(1, {"CUDA_VISIBLE_DEVICES=1,2,3", "HIP_VISIBLE_DEVICES=6,4"}),
              IsSupersetOf({"CUDA_VISIBLE_DEVICES=4", "HIP_VISIBLE_DEVICES=4"}));
  EXPECT_THAT(environment(1, {"CUDA_VISIBLE_DEVICES=1,2", "HIP_VISIBLE_DEVICES="}),
              IsSupersetOf({"CUDA_VISIBLE_DEVICES=2", "HIP_VISIBLE_DEVICES="}));
  try {
    environment(2, {"CUDA_VISIBLE_DEVICES=1,2"});
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(),
                StartsWith("CUDA_VISIBLE_DEVICES=1,2 names no device for local rank 2, "));
  }
}

TEST(LogDirectory, IsOfTheRunAlone) {
  const test::TemporaryDirectory directory;
  const auto start = directory.path() / "new" / "job_";
  const auto one = make_run_directory(start);
  const auto two = make_run_directory(start);
  EXPECT_NE(one, two);
  for (const auto& run : {one, two}) {
    EXPECT_THAT(run.string(), StartsWith(start.string()));
    EXPECT_TRUE(std::filesystem::is_empty(run));
  }
  std::ofstream(directory.path() / "file") << "no directory";
  try {
    make_run_directory(directory.path() / "file" / "job_");
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("/file: Not a directory (ENOTDIR)"));
  }
}

TEST(LogDirectory, OneThatIsTemporaryGoes) {
  std::filesystem::path path;
  {
    const JobDirectory temporary({}, 2);
    path = temporary.path();
    EXPECT_TRUE(std::filesystem::is_directory(path / "1"));
  }
  EXPECT_FALSE(std::filesystem::exists(path));
  const test::TemporaryDirectory directory;
  { const JobDirectory kept(directory.path() / "attempt_0", 1); }
  EXPECT_TRUE(std::filesystem::is_directory(directory.path() / "attempt_0" / "0"));
}

TEST(LogDirectory, ReadsTheEndOfAFile) {
  const test::TemporaryDirectory directory;
  const auto path = directory.path() / "log";
  EXPECT_EQ(read_end(path, 5), "");
  std::ofstream(path) << "0123456789";
  EXPECT_EQ(read_end(path, 4), "6789");
  EXPECT_EQ(read_end(path, 10), "0123456789");
  EXPECT_EQ(read_end(path, 99), "0123456789");
  EXPECT_EQ(read_end(directory.path(), 5), "");
}

TEST(FindProgram, SearchesAsAShellDoes) {
  const test::TemporaryDirectory directory;
  const auto file = directory.path() / "tool";
  std::ofstream(file) << "#!/bin/sh\n";
  const auto code = [&](const std::string& name) {
    try {
      find_program(name, directory.path().string());
      return 0;
    } catch (const ProgramError& error) {
      return error.exit_code();
    }
  };
  EXPECT_EQ(code("tool"), 127);  // not executable: not a candidate on PATH
  EXPECT_EQ(code(file.string()), 126);
  EXPECT_EQ(code(directory.path().string()), 126);
  std::filesystem::permissions(file, std::filesystem::perms::owner_all);
  EXPECT_EQ(find_program("tool", "/nowhere:" + directory.path().string()), file.string());
  EXPECT_EQ(find_program(file.string(), ""), file.string());
  EXPECT_EQ(code("tool2"), 127);
  EXPECT_EQ(code(""), 127);
}

TEST(RunJob, RejectsInvalidSpecs) {
  JobSpec spec;
  EXPECT_THROW(run_job(spec), UsageError);  // no program
  spec.command = {"true"};
  for (const int processes : {0, -1, kMaxProcesses + 1}) {
    spec.processes = processes;
    EXPECT_THROW(run_job(spec), UsageError) << processes;
  }
  spec.processes = 1;
  spec.cpus = {{0}, {0}};
  EXPECT_THROW(run_job(spec), UsageError);
  spec.cpus.clear();
  spec.destinations = {{Destination::file, Destination::console}};
  EXPECT_THROW(run_job(spec), UsageError);  // no directory
  spec.directory = "/nonexistent/directory";
  spec.destinations.push_back(spec.destinations.front());
  EXPECT_THROW(run_job(spec), UsageError);
  spec.destinations.clear();
  spec.directory.clear();
  spec.master_port = 65536;
  EXPECT_THROW(run_job(spec), UsageError);
  spec.master_port = 0;
  spec.max_replacements = -1;
  EXPECT_THROW(run_job(spec), UsageError);
  spec.max_replacements = 1;
  spec.nodes = spec.world_size = 2;
  EXPECT_THROW(run_job(spec), UsageError);
}

TEST(RunJob, OutputGoesToTheSinkAndAnExceptionFromItKillsTheJob) {
  JobSpec spec;
  spec.processes = 2;
  spec.command = {"sh", "-c", "echo rank $RANK; test $RANK = 0 || exec sleep 1000"};
  spec.output = [](int, Stream, std::string_view bytes) {
    if (bytes == "rank 1\n") throw std::runtime_error("enough");
  };
  EXPECT_THROW(run_job(spec), std::runtime_error);
}

// What came before the processes, with the request to start them.
class FailedElsewhere : public OtherNodes {
 public:
  std::chrono::milliseconds add_to(std::vector<pollfd>&) const override {
    return std::chrono::hours(1);
  }
  std::vector<NodeRequest> receive() override { return std::exchange(requests_, {}); }
  void report_failure(const std::vector<int>&) override {}
  void report_signal(int) override {}

 private:
  std::vector<NodeRequest> requests_{NodeRequest{}};
};

TEST(RunJob, HeedsRequestsThatCameBeforeItsProcesses) {
  FailedElsewhere others;
  JobSpec spec;
  spec.command = {"sleep", "1000"};
  spec.nodes = 2;
  spec.world_size = 2;
  spec.other_nodes = &others;
  spec.failure_grace = std::chrono::milliseconds(0);
  const JobResult result = run_job(spec);
  ASSERT_EQ(result.ranks.size(), 1U);
  EXPECT_EQ(result.ranks[0].status, SIGTERM);
  EXPECT_TRUE(result.ranks[0].stopped);
}

}  // namespace
}  // namespace paceline::launch
