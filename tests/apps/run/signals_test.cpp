// The real `paceline` with small shell programs as workers: signals to the launcher.
#include <gmock/gmock.h>
#include <sys/ptrace.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "launcher.h"

namespace paceline {
namespace {

using test::eventually;
using test::guard_of;
using test::Launcher;
using test::pid_after;
using test::pids_after;
using ::testing::HasSubstr;

TEST_F(Launcher, ForwardsSigint) {
  auto job = run(2, "trap 'echo caught; exit 0' INT; echo ready; while :; do sleep 0.01; done",
                 {"--stop-grace", "60"});
  for (const char* line : {"[rank0]: ready", "[rank1]: ready"}) job.wait_for(line);
  job.signal(SIGINT);
  EXPECT_EQ(job.wait(), 128 + SIGINT) << job.err();
  EXPECT_THAT(job.out(), HasSubstr("[rank0]: caught\n"));
  EXPECT_THAT(job.out(), HasSubstr("[rank1]: caught\n"));
  EXPECT_THAT(job.err(), HasSubstr("paceline: stopped by SIGINT\n"));
}

TEST_F(Launcher, ForwardsSigterm) {
  auto job = run(2, "echo ready; exec sleep 1000");
  for (const char* line : {"[rank0]: ready", "[rank1]: ready"}) job.wait_for(line);
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 128 + SIGTERM) << job.err();
}

TEST_F(Launcher, SigtermEndsSuspendedWorkers) {
  auto job = run(1, "echo worker=$$; while :; do sleep 0.01; done", {"--stop-grace", "86400"});
  job.wait_for("worker=");
  const pid_t worker = pid_after(job.out(), "worker");
  ::kill(worker, SIGSTOP);
  ASSERT_TRUE(eventually([&] { return test::process_state(worker) == 'T'; }));
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 128 + SIGTERM) << job.err();
}

TEST_F(Launcher, EndsTheJobIfItsOwnProcessesAreSuspended) {
  auto job = run(1, "echo supervisor=$PPID; exec sleep 1000");
  job.wait_for("supervisor=");
  for (const pid_t pid : {guard_of(job), pid_after(job.out(), "supervisor")}) {
    ::kill(pid, SIGSTOP);
    ASSERT_TRUE(eventually([&] { return test::process_state(pid) == 'T'; }));
  }
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 128 + SIGTERM) << job.err();
}

TEST_F(Launcher, SecondSigintKills) {
  auto job = run(2, "trap 'echo caught' INT; echo ready; while :; do sleep 0.01; done",
                 {"--stop-grace", "86400"});
  for (const char* line : {"[rank0]: ready", "[rank1]: ready"}) job.wait_for(line);
  job.signal(SIGINT);
  for (const char* line : {"[rank0]: caught", "[rank1]: caught"}) job.wait_for(line);
  job.signal(SIGINT);
  EXPECT_EQ(job.wait(), 128 + SIGINT) << job.err();
}

TEST_F(Launcher, SecondSigintKillsAfterASigterm) {
  auto job = run(1, "trap 'echo told' INT TERM; echo ready; while :; do sleep 0.01; done",
                 {"--stop-grace", "86400"});
  job.wait_for("ready");
  job.signal(SIGTERM);
  job.wait_for("told");
  job.signal(SIGINT);
  job.wait_for("told\n[rank0]: told");
  job.signal(SIGINT);
  EXPECT_EQ(job.wait(), 128 + SIGTERM) << job.err();
}

// A debugger that has not taken notice of a rank's end keeps that end from the rank's parent.
TEST_F(Launcher, HeedsSignalsWhileADebuggerHoldsARankThatHasEnded) {
  auto job = run(2,
                 "trap 'echo told; exit 0' TERM; echo worker$RANK=$$; "
                 "while :; do sleep 0.01; done",
                 {"--stop-grace", "86400"});
  for (const char* line : {"worker0=", "worker1="}) job.wait_for(line);
  const pid_t held = pid_after(job.out(), "worker1");
  if (::ptrace(PTRACE_SEIZE, held, nullptr, nullptr) != 0) {
    GTEST_SKIP() << "no ptrace: " << std::strerror(errno);
  }
  ::kill(held, SIGKILL);
  ASSERT_TRUE(eventually([&] { return test::process_state(held) == 'Z'; }));
  job.signal(SIGTERM);
  job.wait_for("[rank0]: told");
  EXPECT_EQ(::waitpid(held, nullptr, 0), held);  // so that the parent gets the end
  EXPECT_EQ(job.wait(), 128 + SIGTERM) << job.err();
}

TEST_F(Launcher, SuspendsAndResumesTheJob) {
  auto job = run(2, "echo worker=$$; exec sleep 1000");
  for (const char* line : {"[rank0]: worker=", "[rank1]: worker="}) job.wait_for(line);
  const auto workers = pids_after(job.out(), "worker");
  const auto all_stopped = [&](bool stopped) {
    return std::all_of(workers.begin(), workers.end(),
                       [&](pid_t pid) { return (test::process_state(pid) == 'T') == stopped; });
  };
  job.signal(SIGTSTP);
  EXPECT_TRUE(eventually([&] { return all_stopped(true); }));
  EXPECT_TRUE(eventually([&] { return test::process_state(job.pid()) == 'T'; }));
  job.signal(SIGCONT);
  EXPECT_TRUE(eventually([&] { return all_stopped(false); }));
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 128 + SIGTERM) << job.err();
}

}  // namespace
}  // namespace paceline
