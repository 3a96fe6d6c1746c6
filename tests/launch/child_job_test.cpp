#include "launch/child_job.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <fstream>
#include <thread>

#include "base/pipe.h"
#include "base/signals_blocked.h"
#include "base/unique_fd.h"
#include "launch/job.h"
#include "launch/program.h"
#include "launch/start_worker.h"
#include "support/eventually.h"
#include "support/temporary_directory.h"

namespace paceline::launch {
namespace {

using ::testing::HasSubstr;

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

}  // namespace
}  // namespace paceline::launch
