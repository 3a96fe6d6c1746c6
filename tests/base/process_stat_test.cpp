#include "base/process_stat.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <string>
#include <thread>

#include "base/unique_fd.h"
#include "support/eventually.h"

namespace paceline::base {
namespace {

TEST(ParseStat, AcceptsAnyProcessName) {
  const auto process = parse_stat("42 (a) S 7 9 (b\n) R 12 34 34 0 -1 4194560 5 0 6 0 70 80 0");
  ASSERT_TRUE(process);
  EXPECT_EQ(process->pid, 42);
  EXPECT_EQ(process->state, 'R');
  EXPECT_EQ(process->parent, 12);
  EXPECT_EQ(process->group, 34);
  EXPECT_EQ(process->flags, 4194560u);
  EXPECT_EQ(process->user_ticks, 70u);
  EXPECT_EQ(process->system_ticks, 80u);
  for (const char* stat :
       {"", "42", "42 (sh", "42 (sh)", "42 (sh) ", "42 (sh) S", "42 (sh) S x 3", "42 (sh) S 3",
        "42 (sh) S 1 2 3 4 5", "42 (sh) S 1 2 3 4 5 6 7 8 9 10 11",
        "x (sh) S 1 2 3 4 5 6 7 8 9 10 11 12"}) {
    EXPECT_FALSE(parse_stat(stat)) << stat;
  }
}

TEST(ReadStat, IsEmptyForAProcessThatEndedAfterTheOpen) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::pause();
    ::_exit(0);
  }
  const base::UniqueFd stat(::open(("/proc/" + std::to_string(child) + "/stat").c_str(), O_RDONLY));
  ASSERT_TRUE(stat);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_EQ(read_stat(stat.get()), "");
}

// A child that stops itself, traced by this process or not.
std::string describe_stopped_child(bool traced) {
  const pid_t child = ::fork();
  if (child == 0) {
    if (traced && ::ptrace(PTRACE_TRACEME) != 0) ::_exit(1);
    ::raise(SIGSTOP);
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, WUNTRACED);
  const std::string pid = std::to_string(child);
  std::string text = WIFSTOPPED(status) ? describe_stop(child) : "may not be traced here";
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  if (const auto at = text.find(pid); at != std::string::npos) text.replace(at, pid.size(), "N");
  return text;
}

TEST(DescribeStop, TellsStoppedFromDebuggedProcesses) {
  EXPECT_EQ(describe_stopped_child(false), "its process N is stopped");
  const std::string traced = describe_stopped_child(true);
  if (traced == "may not be traced here") GTEST_SKIP() << traced;
  EXPECT_EQ(traced, "its process N is stopped by a debugger");
}

TEST(IsAsleep, IsTrueOnlyIfNoThreadRuns) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::thread sleeper([] { ::pause(); });
    ::pause();
    ::_exit(1);
  }
  EXPECT_TRUE(test::eventually([&] { return is_asleep(child); }));
  ::kill(child, SIGSTOP);
  EXPECT_TRUE(test::eventually([&] { return !is_asleep(child); })) << "stopped is not asleep";
  ::kill(child, SIGKILL);
  EXPECT_TRUE(test::eventually([&] { return is_asleep(child); })) << "a zombie";
  ::waitpid(child, nullptr, 0);
  EXPECT_FALSE(is_asleep(::getpid()));
}

TEST(DescribeStop, IsEmptyForOthers) {
  EXPECT_EQ(describe_stop(::getpid()), "");
  EXPECT_EQ(describe_stop(0), "");
  EXPECT_EQ(describe_stop(-1), "");
}

}  // namespace
}  // namespace paceline::base
