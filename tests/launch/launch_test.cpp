#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pthread.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <optional>
#include <thread>
#include <utility>

#include "base/pipe.h"
#include "base/signals_blocked.h"
#include "base/unique_fd.h"
#include "launch/child_job.h"
#include "launch/error_file.h"
#include "launch/job.h"
#include "launch/log_directory.h"
#include "launch/process_tree.h"
#include "launch/program.h"
#include "launch/report.h"
#include "launch/signal_names.h"
#include "launch/start_worker.h"
#include "launch/worker_environment.h"
#include "support/eventually.h"
#include "support/temporary_directory.h"

namespace paceline::launch {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::IsSupersetOf;
using ::testing::StartsWith;

class ErrorFileTest : public ::testing::Test {
 protected:
  std::optional<ErrorFile> read(const std::string& content) const {
    std::ofstream(path_) << content;
    return read_error_file(path_);
  }
  test::TemporaryDirectory directory_;
  std::filesystem::path path_ = directory_.path() / "error.json";
};

TEST_F(ErrorFileTest, InMemoryRoundTrips) {
  const base::UniqueFd memory = make_error_memory();
  const auto path = error_memory_path(memory.get());
  EXPECT_TRUE(is_error_memory(memory.get()));
  EXPECT_FALSE(is_error_memory(STDERR_FILENO));
  EXPECT_FALSE(is_error_memory(-1));
  EXPECT_FALSE(read_error_file(path));
  for (const std::string text : {"a long text", "short"}) {
    write_error_file(path, text);
    EXPECT_EQ(read_error_file(path).value().message, text);
  }
}

TEST_F(ErrorFileTest, RoundTrips) {
  write_error_file(path_, "line 1\n\"quoted\" \xff not UTF-8", std::vector<int>{70, 3, 1023});
  const auto error = read_error_file(path_);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->message, "line 1\n\"quoted\" \xEF\xBF\xBD not UTF-8");
  EXPECT_THAT(error->blamed_ranks, ElementsAre(70, 3, 1023));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory_.path()), {}), 1);
}

TEST_F(ErrorFileTest, TellsTheNode) {
  write_error_file(path_, "x", {}, 3);
  std::ifstream file(path_);
  EXPECT_THAT(std::string(std::istreambuf_iterator<char>(file), {}), HasSubstr("\"node\":3"));
}

TEST_F(ErrorFileTest, ReadsTorchrunsForms) {
  const auto full =
      read(R"({"message": {"message": "RuntimeError: x", "extraInfo": {"py_callstack": "...", )"
           R"("timestamp": "1732183701"}}})");
  ASSERT_TRUE(full);
  EXPECT_EQ(full->message, "RuntimeError: x");
  EXPECT_THAT(full->blamed_ranks, IsEmpty());
  ASSERT_TRUE(read(R"({"message": "just text"})"));
  EXPECT_EQ(read(R"({"message": "just text"})")->message, "just text");
}

TEST_F(ErrorFileTest, IgnoresGarbage) {
  EXPECT_FALSE(read_error_file(path_));
  const std::string whole = R"({"message": {"message": "m", "extraInfo": {"timestamp": "1"}}})";
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_FALSE(read(whole.substr(0, size))) << size;
  }
  for (const char* content : {"[]", "7", "\"text\"", "{\"message\": 3}", "{\"message\": {}}",
                              "{\"message\": {\"message\": []}}", "\xff\xfe\x00"}) {
    EXPECT_FALSE(read(content)) << content;
  }
  EXPECT_FALSE(read(std::string(100'000, '[')));
  EXPECT_FALSE(read(R"({"message": ")" + std::string(2 << 20, 'x') + "\"}"));
}

TEST_F(ErrorFileTest, IgnoresInvalidBlame) {
  const auto error = read(
      R"({"message": {"message": "m", "extraInfo": {"blamed_ranks": [1, "2", null, 99999999999]}}})");
  ASSERT_TRUE(error);
  EXPECT_EQ(error->message, "m");
  EXPECT_THAT(error->blamed_ranks, ElementsAre(1));
}

TEST_F(ErrorFileTest, DoesNotBlockOnFifosOrDirectories) {
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  EXPECT_FALSE(read_error_file(path_));
  EXPECT_FALSE(read_error_file(directory_.path()));
}

TEST_F(ErrorFileTest, NamesAPathThatCannotBeWritten) {
  try {
    write_error_file(directory_.path() / "no" / "x.json", "m");
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("no/x.json"));
    EXPECT_THAT(error.what(), HasSubstr("ENOENT"));
  }
}

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

TEST(RunChildJob, ReportsHowItsProcessesEndedAndLeavesNone) {
  JobSpec spec;
  spec.processes = 2;
  spec.failure_grace = std::chrono::milliseconds(0);
  spec.command = {"sh", "-c",
                  "read line; test $RANK = 1 || exec sleep 1000; "
                  "echo > /proc/self/fd/$PACELINE_ERROR_FD; exit 7"};
  const JobResult result = run_child_job(spec, "/bin/sh");
  EXPECT_EQ(result.first_failed(), 1);
  EXPECT_EQ(exit_code_of(result.ranks[1].status), 7);
  EXPECT_EQ(exit_code_of(result.ranks[0].status), 128 + SIGTERM);
  EXPECT_TRUE(result.ranks[0].stopped);
  EXPECT_TRUE(result.ranks[0].pending);
  EXPECT_FALSE(result.ranks[1].pending);
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
}

// The other thread's child has copies of what watches the processes.
TEST(RunChildJob, IsNotConfusedByAForkOfAnotherThread) {
  const test::TemporaryDirectory directory;
  pid_t bystander = -1;
  base::Pipe held = base::make_pipe();  // the child ends when this process closes it, or ends
  std::thread forker([&] {
    const auto is_there = [&](const char* name) {
      return std::filesystem::exists(directory.path() / name);
    };
    while (!is_there("started0") || !is_there("started1")) std::this_thread::yield();
    bystander = ::fork();
    if (bystander == 0) {
      held.write_end.reset();
      char none = 0;
      ::_exit(static_cast<int>(::read(held.read_end.get(), &none, 1)));
    }
    std::ofstream(directory.path() / "go") << "now";
  });
  JobSpec spec;
  spec.processes = 2;
  spec.environment["MARKS"] = directory.path().string();
  spec.command = {"sh", "-c",
                  "echo > $MARKS/started$RANK; until [ -e $MARKS/go ]; do sleep 0.01; done; "
                  "[ $RANK = 0 ] || sleep 0.2"};
  std::optional<JobResult> result;
  EXPECT_NO_THROW(result = run_child_job(spec, "/bin/sh"));
  forker.join();
  for (const RankResult& rank : result.value_or(JobResult()).ranks) {
    EXPECT_EQ(rank.status, 0);
    EXPECT_FALSE(rank.stopped);
  }
  ASSERT_GT(bystander, 0);
  held.write_end.reset();
  EXPECT_EQ(::waitpid(bystander, nullptr, 0), bystander);
}

// A bystander that is forked at the worst moment, as another thread might do.
struct ForkedBystander {
  static inline base::Pipe* held = nullptr;  // it ends when the write end is closed
  static inline pid_t pid = -1;

  static void fork_one() {
    if (held == nullptr || pid > 0) return;
    pid = static_cast<pid_t>(::syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0));
    if (pid != 0) return;
    ::close(held->write_end.get());
    pollfd end{held->read_end.get(), POLLIN, 0};
    ::_exit(::poll(&end, 1, 1000 * static_cast<int>(test::kTestTimeout.count())) == 1 ? 0 : 1);
  }
};

TEST(StartWorker, DoesNotWaitForABystanderThatHasTheConnection) {
  const base::UniqueFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  Worker worker;
  worker.arguments = {"true"};
  worker.standard.fill(null.get());
  static const int registered = ::pthread_atfork(&ForkedBystander::fork_one, nullptr, nullptr);
  ASSERT_EQ(registered, 0);
  for (const char* file : {"/bin/true", "/nowhere/true"}) {
    base::Pipe held = base::make_pipe();
    ForkedBystander::held = &held;
    ForkedBystander::pid = -1;
    worker.file = file;
    pid_t started = -1;
    const int error = start_worker(worker, base::signal_mask(), [&](pid_t pid) { started = pid; });
    ForkedBystander::held = nullptr;
    ASSERT_GT(ForkedBystander::pid, 0);
    EXPECT_EQ(error, worker.file == "/bin/true" ? 0 : ENOENT);
    if (error == 0) {
      EXPECT_EQ(::waitpid(started, nullptr, 0), started);
    }
    held.write_end.reset();
    int status = -1;
    EXPECT_EQ(::waitpid(ForkedBystander::pid, &status, 0), ForkedBystander::pid);
    EXPECT_EQ(status, 0) << "the start took as long as the bystander lived";
  }
}

TEST(RunChildJob, NamesAProgramThatCannotBeStarted) {
  JobSpec spec;
  spec.processes = 2;
  spec.command = {"nothing"};
  try {
    run_child_job(spec, "/nowhere/nothing");
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("/nowhere/nothing"));
    EXPECT_THAT(error.what(), HasSubstr("ENOENT"));
  }
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
}

RankResult ended(int order, int status, bool stopped = false) {
  return {.status = status,
          .ended = std::chrono::nanoseconds(order),
          .stopped = stopped,
          .error = {},
          .last_lines = {}};
}

constexpr int exited(int code) {
  return code << 8;
}

TEST(FirstFailed, IsTheEarliestUnlessItBlamesAnother) {
  JobResult result;
  result.ranks = {ended(1, exited(1)), ended(2, SIGSEGV), ended(0, exited(0))};
  EXPECT_EQ(result.first_failed(), 0);
  EXPECT_EQ(result.exit_code(), 1);
  result.ranks[0].error = ErrorFile{"PeerLost", {1}};
  EXPECT_EQ(result.first_failed(), 1);
  EXPECT_EQ(result.exit_code(), 128 + SIGSEGV);
  result.ranks[0].error = ErrorFile{"blames itself and nobody", {0, 9, -1}};
  EXPECT_EQ(result.first_failed(), 0);
}

TEST(FirstFailed, IsABlamedRankThatEndedEarlyWithCodeZero) {
  JobResult result;
  result.ranks = {ended(1, exited(4)), ended(0, exited(0)), ended(2, exited(1))};
  result.ranks[0].error = ErrorFile{"rank 1 has left the group", {1}};
  EXPECT_EQ(result.first_failed(), 1);
  EXPECT_EQ(result.exit_code(), 4) << "not that of the culprit, which is 0";
  result.ranks[0].error = ErrorFile{"blames one that failed too", {1, 2}};
  EXPECT_EQ(result.first_failed(), 2);
  result.ranks[0].error = ErrorFile{"blames one that ended when told to", {1}};
  result.ranks[1].stopped = true;
  EXPECT_EQ(result.first_failed(), 0);
}

TEST(FirstFailed, ToleratesCircularBlame) {
  JobResult result;
  result.ranks = {ended(0, exited(3)), ended(1, exited(4))};
  result.ranks[0].error = ErrorFile{"", {1}};
  result.ranks[1].error = ErrorFile{"", {0}};
  EXPECT_EQ(result.first_failed(), 0);
}

TEST(FirstFailed, IsNoneIfTheLauncherWasInterrupted) {
  JobResult result;
  result.ranks = {ended(0, SIGINT, true), ended(1, exited(1), true)};
  result.signal = SIGINT;
  EXPECT_FALSE(result.first_failed());
  EXPECT_EQ(result.exit_code(), 130);
  EXPECT_EQ(failure_report(result), "paceline: stopped by SIGINT\n");
}

TEST(FailureReport, IsOneBlock) {
  JobResult result;
  result.ranks = {ended(1, exited(1)), ended(0, SIGKILL), ended(3, SIGTERM, true),
                  ended(2, SIGTERM, true), ended(4, exited(0), true)};
  result.ranks[0].error = ErrorFile{"PeerLost: rank 1 has ended\nmore", {1}};
  result.ranks[1].error = ErrorFile{"two\nlines\n", {}};
  result.ranks[1].last_lines = {"step 1", "step 2"};
  EXPECT_EQ(failure_report(result),
            "paceline: rank 1 failed first: killed by SIGKILL (often the kernel's out-of-memory "
            "killer)\n"
            "  error: two\n"
            "         lines\n"
            "  last lines of rank 1:\n"
            "    | step 1\n"
            "    | step 2\n"
            "  rank 0: exited with code 1: PeerLost: rank 1 has ended\n"
            "  ranks 2, 3: stopped by SIGTERM\n"
            "  rank 4: exited with code 0 when asked to stop\n");
}

TEST(FailureReport, NamesARankThatEndedEarlyFirst) {
  JobResult result;
  result.ranks = {ended(1, exited(1)), ended(0, exited(0)), ended(2, exited(1))};
  result.ranks[0].error = result.ranks[2].error = ErrorFile{"rank 1 has left the group", {1}};
  result.ranks[1].last_lines = {"done"};
  EXPECT_EQ(failure_report(result),
            "paceline: rank 1 ended early: exited with code 0 while other ranks needed it\n"
            "  last lines of rank 1:\n"
            "    | done\n"
            "  ranks 0, 2: exited with code 1: rank 1 has left the group\n");
}

TEST(FailureReport, DistinguishesFailuresFromStops) {
  JobResult result;
  result.ranks = {ended(0, exited(1)), ended(1, SIGSEGV, true), ended(2, SIGTERM, true)};
  result.ranks[2].error = ErrorFile{"disk full", {}};
  EXPECT_EQ(failure_report(result),
            "paceline: rank 0 failed first: exited with code 1\n"
            "  rank 1: killed by SIGSEGV (an invalid memory access) when asked to stop\n"
            "  rank 2: stopped by SIGTERM: disk full\n");
}

// A terminal would obey them: change its title, clear the screen, ring.
TEST(FailureReport, EscapesControlCharactersOfErrorFiles) {
  JobResult result;
  result.ranks = {ended(0, exited(1)), ended(1, exited(1))};
  result.ranks[0].error = ErrorFile{std::string("a\tb\n\x1b]0;title\a\0\r\x7f \xC2\x9B"
                                                "2J \u00e9",
                                                25),
                                    {}};
  result.ranks[1].error = ErrorFile{"\x1b[2J", {}};
  EXPECT_EQ(failure_report(result),
            "paceline: rank 0 failed first: exited with code 1\n"
            "  error: a\tb\n"
            "         \\x1b]0;title\\x07\\x00\\x0d\\x7f \\u009b2J \u00e9\n"
            "  rank 1: exited with code 1: \\x1b[2J\n");
}

TEST(FailureReport, IsEmptyIfNothingFailed) {
  JobResult result;
  result.ranks = {ended(0, 0)};
  EXPECT_EQ(failure_report(result), "");
  EXPECT_EQ(result.exit_code(), 0);
}

// What came before the processes, with the request to start them.
class FailedElsewhere : public OtherNodes {
 public:
  void add_to(std::vector<pollfd>&) const override {}
  std::vector<int> receive() override { return std::exchange(requests_, {}); }
  void report_failure() override {}
  void report_signal(int) override {}

 private:
  std::vector<int> requests_{0};
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
