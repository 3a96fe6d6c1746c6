// The real `paceline` with small shell programs as workers.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <sstream>
#include <thread>
#include <utility>

#include "base/pipe.h"
#include "base/unique_fd.h"
#include "support/child_process.h"
#include "support/temporary_directory.h"

namespace paceline {
namespace {

using test::ChildProcess;
using test::eventually;
using test::has_ended;
using test::is_gone;
using ::testing::Contains;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

using Environment = std::vector<std::pair<std::string, std::string>>;

class Launcher : public ::testing::Test {
 protected:
  void TearDown() override {
    EXPECT_THAT(left_behind(), IsEmpty()) << "in the directory for temporary files";
  }

  // Starts `script` as the program of `ranks` workers; `flags` go before it.
  ChildProcess run(int ranks, const std::string& script, std::vector<std::string> flags = {},
                   Environment environment = {}, base::Pipe out = base::make_pipe(),
                   bool err_too = false) {
    std::vector<std::string> command{PACELINE_COMMAND, "run", "--nproc-per-node",
                                     std::to_string(ranks)};
    command.insert(command.end(), flags.begin(), flags.end());
    command.insert(command.end(), {"sh", "-c", script});
    environment.emplace_back("TMPDIR", temporary_.path().string());
    return ChildProcess(std::move(command), environment, std::move(out), err_too);
  }

  static ChildProcess paceline(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), PACELINE_COMMAND);
    return ChildProcess(std::move(arguments));
  }

  // The launcher's directory goes last, a moment after a launcher that was killed.
  std::vector<std::string> left_behind() const {
    std::vector<std::string> names;
    const auto look = [&] {
      names.clear();
      for (const auto& entry : std::filesystem::directory_iterator(temporary_.path())) {
        names.push_back(entry.path().filename().string());
      }
      return names.empty();
    };
    eventually(look);
    return names;
  }

  test::TemporaryDirectory temporary_;
};

// All numbers that follow `label` in `text`.
std::vector<pid_t> pids_after(const std::string& text, const std::string& label) {
  std::vector<pid_t> pids;
  const std::string pattern = label + "=";
  for (auto at = text.find(pattern); at != text.npos; at = text.find(pattern, at + 1)) {
    pids.push_back(std::atoi(text.c_str() + at + pattern.size()));
  }
  return pids;
}

pid_t pid_after(const std::string& text, const std::string& label) {
  const auto pids = pids_after(text, label);
  return pids.size() == 1 ? pids.front() : throw std::runtime_error(label + " in " + text);
}

TEST_F(Launcher, PrefixesOutputAndKeepsTheStreamsApart) {
  auto job = run(2, "echo out $RANK of $WORLD_SIZE; echo err >&2; printf unfinished");
  EXPECT_EQ(job.wait(), 0) << job.err();
  for (const char* line : {"[rank0]: out 0 of 2\n", "[rank1]: out 1 of 2\n",
                           "[rank0]: unfinished\n", "[rank1]: unfinished\n"}) {
    EXPECT_THAT(job.out(), HasSubstr(line));
  }
  EXPECT_THAT(job.err(), HasSubstr("[rank0]: err\n"));
  EXPECT_THAT(job.err(), HasSubstr("[rank1]: err\n"));
  EXPECT_THAT(job.out(), Not(HasSubstr("err")));
}

TEST_F(Launcher, LosesNoOutput) {
  auto job = run(2, "seq 1 50000");
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(std::count(job.out().begin(), job.out().end(), '\n'), 100000);
  EXPECT_THAT(job.out(), HasSubstr("[rank1]: 50000\n"));
}

// What a pipe takes that nobody reads.
std::string fill(int write_end) {
  ::fcntl(write_end, F_SETFL, O_NONBLOCK);
  std::string filling;
  while (::write(write_end, "full\n", 5) == 5) filling += "full\n";
  return filling;
}

TEST_F(Launcher, WaitsForASlowReaderOfANonBlockingPipe) {
  auto [reader, writer] = base::make_pipe();
  const std::string filling = fill(writer.get());
  auto job = run(1, "seq 1 30000", {}, {}, {base::UniqueFd(), std::move(writer)});
  std::string text;
  std::array<char, 4096> buffer;
  for (ssize_t size = 0; (size = ::read(reader.get(), buffer.data(), buffer.size())) > 0;) {
    text.append(buffer.data(), static_cast<std::size_t>(size));
  }
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(text.substr(0, filling.size()), filling);
  EXPECT_EQ(
      std::count(text.begin() + static_cast<std::ptrdiff_t>(filling.size()), text.end(), '\n'),
      30000);
}

TEST_F(Launcher, HearsSignalsWhileNobodyReadsItsOutput) {
  auto [reader, writer] = base::make_pipe();
  fill(writer.get());
  ::fcntl(writer.get(), F_SETFL, 0);
  // The worker is stopped by its full pipe once the launcher no longer reads.
  auto job = run(1, "echo worker=$$ >&2; exec yes", {}, {}, {base::UniqueFd(), std::move(writer)});
  job.wait_for("worker=");
  const pid_t worker = pid_after(job.err(), "worker");
  ASSERT_TRUE(eventually([&] { return test::process_state(worker) == 'S'; }));
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 128 + SIGTERM) << job.err();
}

TEST_F(Launcher, EndsAfterAFailureThoughNobodyReadsItsOutput) {
  auto [reader, writer] = base::make_pipe();
  fill(writer.get());
  ::fcntl(writer.get(), F_SETFL, 0);
  auto job = run(1, "seq 1 100; exit 3", {}, {}, {base::UniqueFd(), std::move(writer)});
  EXPECT_EQ(job.wait(), 3) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("paceline: rank 0 exited with code 3\n"));
  EXPECT_THAT(job.err(),
              HasSubstr("paceline: standard output was not read for 10 s; the rest is dropped\n"));
}

TEST_F(Launcher, StatesTheThreadsAndLeavesTheUsersChoice) {
  auto chosen = run(2, "echo threads=$OMP_NUM_THREADS", {}, {{"OMP_NUM_THREADS", ""}});
  EXPECT_EQ(chosen.wait(), 0);
  const auto threads = pids_after(chosen.out(), "threads");
  ASSERT_EQ(threads.size(), 2U);
  EXPECT_THAT(chosen.err(), HasSubstr("paceline: 2 processes, " + std::to_string(threads[0]) +
                                      (threads[0] == 1 ? " thread each (" : " threads each (")));
  auto given = run(1, "echo threads=$OMP_NUM_THREADS", {}, {{"OMP_NUM_THREADS", "7"}});
  EXPECT_EQ(given.wait(), 0);
  EXPECT_EQ(given.out(), "[rank0]: threads=7\n");
  EXPECT_THAT(given.err(), HasSubstr("OMP_NUM_THREADS=7"));
}

TEST_F(Launcher, TunesMallocUnlessTheUserSaysOtherwise) {
  const std::string show = "echo $MALLOC_MMAP_THRESHOLD_,$MALLOC_TRIM_THRESHOLD_";
  auto tuned = run(1, show);
  EXPECT_EQ(tuned.wait(), 0);
  EXPECT_EQ(tuned.out(), "[rank0]: 1073741824,2147483647\n");
  auto off = run(1, show, {"--no-tune-malloc"});
  EXPECT_EQ(off.wait(), 0);
  EXPECT_EQ(off.out(), "[rank0]: ,\n");
  auto chosen = run(1, show, {}, {{"MALLOC_TRIM_THRESHOLD_", "5"}});
  EXPECT_EQ(chosen.wait(), 0);
  EXPECT_EQ(chosen.out(), "[rank0]: ,5\n");
}

TEST_F(Launcher, BothSpellingsAndTheProgramsOwnFlags) {
  ChildProcess job({PACELINE_COMMAND, "run", "--nproc_per_node=2", "--pass_local_rank", "echo",
                    "--nproc-per-node", "9"});
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(job.out(), HasSubstr("[rank0]: --nproc-per-node 9 --local_rank=0\n"));
  EXPECT_THAT(job.out(), HasSubstr("[rank1]: --nproc-per-node 9 --local_rank=1\n"));
}

// The lines of one rank, without their prefix.
std::vector<std::string> lines_of(const std::string& text, int rank) {
  std::vector<std::string> lines;
  const std::string prefix = "[rank" + std::to_string(rank) + "]: ";
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    if (line.rfind(prefix, 0) == 0) lines.push_back(line.substr(prefix.size()));
  }
  return lines;
}

TEST_F(Launcher, WorkersHaveTheirOwnDescriptorsAndNoOthers) {
  const base::UniqueFd stray(::dup(STDERR_FILENO));  // the launcher inherits it, its workers do not
  auto job = run(3,
                 "echo 0 1 2 $PACELINE_LINKS $PACELINE_STORE_FD | tr ', ' '\n\n' | sort;"
                 "echo are; ls /proc/$$/fd; echo open; readlink /proc/$$/fd/*; exit 0");
  EXPECT_EQ(job.wait(), 0) << job.err();
  for (const int rank : {0, 1, 2}) {
    const auto lines = lines_of(job.out(), rank);
    const auto are = std::find(lines.begin(), lines.end(), "are");
    const auto open = std::find(lines.begin(), lines.end(), "open");
    ASSERT_NE(open, lines.end()) << job.out();
    EXPECT_EQ(std::vector(lines.begin(), are), std::vector(are + 1, open));
    EXPECT_EQ(std::distance(lines.begin(), are), rank == 0 ? 6 : 5);
    const auto sockets = std::count_if(open, lines.end(), [](const std::string& target) {
      return target.rfind("socket:", 0) == 0;
    });
    EXPECT_EQ(sockets, rank == 0 ? 2 : 1);
    EXPECT_THAT(lines, Contains(HasSubstr("memfd:paceline-store")));
  }
}

TEST_F(Launcher, ExitCodeIsThatOfTheFirstFailure) {
  auto job = run(3, "test $RANK = 1 && { echo last words; exit 7; }; exec sleep 1000",
                 {"--stop-grace", "60"});
  EXPECT_EQ(job.wait(), 7) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("paceline: rank 1 failed first: exited with code 7\n"
                                   "  last lines of rank 1:\n"
                                   "    | last words\n"
                                   "  ranks 0, 2: stopped by SIGTERM\n"));
}

TEST_F(Launcher, DeathByASignalIsDecoded) {
  auto job = run(2, "test $RANK = 0 && kill -KILL $$; exec sleep 1000");
  EXPECT_EQ(job.wait(), 128 + SIGKILL) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("rank 0 failed first: killed by SIGKILL (often the kernel's"));
}

TEST_F(Launcher, ErrorFilesAreReportedAndBlameIsFollowed) {
  // Rank 0 is certainly gone first, and says that it was because of rank 1.
  auto job = run(2, R"(
    if [ $RANK = 0 ]; then
      printf '{"message": {"message": "lost", "extraInfo": {"blamed_ranks": [1]}}}' \
        > $TORCHELASTIC_ERROR_FILE
      echo gone > $TMPDIR/go; exit 1
    fi
    until [ -e $TMPDIR/go ]; do :; done
    rm $TMPDIR/go
    printf '{"message": {"message": "the real reason"}}' > $TORCHELASTIC_ERROR_FILE
    exit 5)",
                 {"--failure-grace", "60"});
  EXPECT_EQ(job.wait(), 5) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("rank 1 failed first: exited with code 5\n"
                                   "  error: the real reason\n"
                                   "  rank 0: exited with code 1: lost\n"));
}

// Rank 1 is slow to end, long after rank 0's end would have had it stopped.
constexpr const char* kRank1EndsSlowly = R"(
    if [ $RANK = 0 ]; then
      until [ -e $TMPDIR/failing ]; do :; done
      rm $TMPDIR/failing
      printf '{"message": {"message": "lost", "extraInfo": {"blamed_ranks": [%s]}}}' $blamed \
        > $TORCHELASTIC_ERROR_FILE
      exit 1
    fi
    fail; : > $TMPDIR/failing; sleep 0.3; exit 5)";

TEST_F(Launcher, ABlamedRankHasTimeToEndByItself) {
  auto job = run(2, "blamed=1; fail() { :; }" + std::string(kRank1EndsSlowly),
                 {"--failure-grace", "0", "--stop-grace", "20"});
  EXPECT_EQ(job.wait(), 5) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("rank 1 failed first: exited with code 5\n"
                                   "  rank 0: exited with code 1: lost\n"));
}

TEST_F(Launcher, ARankWithAnErrorFileHasTimeToEndByItself) {
  auto job = run(2,
                 "fail() { printf '{\"message\": \"full\"}' > $TORCHELASTIC_ERROR_FILE; }" +
                     std::string(kRank1EndsSlowly),
                 {"--failure-grace", "0", "--stop-grace", "20"});
  EXPECT_EQ(job.wait(), 1) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("rank 0 failed first: exited with code 1\n  error: lost\n"
                                   "  rank 1: exited with code 5: full\n"));
}

TEST_F(Launcher, ABlamedRankThatDoesNotEndIsStopped) {
  auto job = run(
      2,
      "blamed=1; fail() { : > $TMPDIR/failing; exec sleep 1000; }" + std::string(kRank1EndsSlowly),
      {"--failure-grace", "0", "--stop-grace", "0.2"});
  EXPECT_EQ(job.wait(), 1) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("rank 1: stopped by SIGTERM\n"));
}

TEST_F(Launcher, OthersHaveTimeForTheirOwnErrors) {
  auto job = run(2, R"(
    if [ $RANK = 1 ]; then echo $$ > $TMPDIR/new; mv $TMPDIR/new $TMPDIR/pid; exit 3; fi
    until [ -e $TMPDIR/pid ]; do :; done
    read pid < $TMPDIR/pid
    rm $TMPDIR/pid
    while kill -0 $pid 2> /dev/null; do :; done
    exit 4)",
                 {"--failure-grace", "60"});
  EXPECT_EQ(job.wait(), 3) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("rank 0: exited with code 4\n"));
}

// Once rank 0, which goes on and on, has its trap.
constexpr const char* kRank1FailsLater = R"(
    if [ $RANK = 1 ]; then
      until [ -e $TMPDIR/up ]; do :; done
      rm $TMPDIR/up
      fail
    fi
    : > $TMPDIR/up
    while :; do sleep 0.01; done)";

TEST_F(Launcher, SigtermComesHalfASecondAfterTheFailure) {
  auto job = run(2,
                 R"(
    fail() { echo failing=$(date +%s%3N); exit 3; }
    trap 'echo told=$(date +%s%3N); exit 4' TERM)" +
                     std::string(kRank1FailsLater),
                 {"--stop-grace", "60"});
  EXPECT_EQ(job.wait(), 3) << job.err();
  const auto ms_after = [&](const std::string& label) {
    return std::stoll(job.out().substr(job.out().find(label + "=") + label.size() + 1));
  };
  EXPECT_GE(ms_after("told") - ms_after("failing"), 499);
}

TEST_F(Launcher, WhoIgnoresSigtermIsKilled) {
  auto job = run(2, "fail() { exit 3; }; trap '' TERM" + std::string(kRank1FailsLater),
                 {"--failure-grace", "0.1", "--stop-grace", "0.2"});
  EXPECT_EQ(job.wait(), 3) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("rank 0: stopped by SIGKILL\n"));
}

TEST_F(Launcher, OrderOfFailuresIsTrueEvenIfNoticedLate) {
  auto job = run(2, "echo supervisor$RANK=$PPID worker$RANK=$$; exec sleep 1000");
  job.wait_for("worker0=");
  job.wait_for("worker1=");
  const pid_t supervisor = pid_after(job.out(), "supervisor0");
  ::kill(supervisor, SIGSTOP);
  ASSERT_TRUE(eventually([&] { return test::process_state(supervisor) == 'T'; }));
  for (const auto& [worker, number] : {std::pair{"worker1", SIGSEGV}, {"worker0", SIGABRT}}) {
    const pid_t pid = pid_after(job.out(), worker);
    ::kill(pid, number);
    ASSERT_TRUE(eventually([&] { return test::process_state(pid) == 'Z'; }));
  }
  ::kill(supervisor, SIGCONT);
  EXPECT_EQ(job.wait(), 128 + SIGSEGV) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("rank 1 failed first: killed by SIGSEGV"));
}

// A worker with a child in its group and one that has left for its own session, both up when the
// worker goes on.
constexpr const char* kFamily = R"(
  sleep 1000 & echo child=$!
  setsid sh -c 'echo escaped=$$; : > $TMPDIR/up$RANK; exec sleep 1000' &
  until [ -e $TMPDIR/up$RANK ]; do :; done
  rm $TMPDIR/up$RANK
  echo supervisor=$PPID; echo worker=$$
)";

void wait_for_families(ChildProcess& job, int ranks) {
  for (int rank = 0; rank < ranks; ++rank) {
    for (const char* label : {"child=", "escaped=", "worker="}) {
      job.wait_for("[rank" + std::to_string(rank) + "]: " + label);
    }
  }
}

void expect_all_gone(const ChildProcess& job) {
  for (const char* label : {"child", "escaped", "worker"}) {
    const auto pids = pids_after(job.out(), label);
    EXPECT_THAT(pids, Not(IsEmpty())) << label;
    for (const pid_t pid : pids) EXPECT_TRUE(eventually([&] { return is_gone(pid); })) << label;
  }
  // Without its launcher it is a zombie until the machine's first process comes round to it.
  const pid_t supervisor = pids_after(job.out(), "supervisor").at(0);
  EXPECT_TRUE(eventually([&] { return has_ended(supervisor); }));
}

// The launcher's child, which is the supervisor's parent.
pid_t guard_of(const ChildProcess& job) {
  const pid_t supervisor = pids_after(job.out(), "supervisor").at(0);
  std::ifstream file("/proc/" + std::to_string(supervisor) + "/status");
  for (std::string word; file >> word;) {
    pid_t parent = 0;
    if (word == "PPid:" && file >> parent) return parent;
  }
  throw std::runtime_error("the supervisor has ended");
}

TEST_F(Launcher, KilledLauncherLeavesNoProcess) {
  auto job = run(2, std::string(kFamily) + "wait");
  wait_for_families(job, 2);
  job.signal(SIGKILL);
  EXPECT_EQ(job.wait(), 128 + SIGKILL) << job.err();
  expect_all_gone(job);
}

TEST_F(Launcher, KilledSupervisorTakesTheWorkersAlong) {
  auto job = run(2, std::string(kFamily) + "wait");
  wait_for_families(job, 2);
  ::kill(pids_after(job.out(), "supervisor").front(), SIGKILL);
  EXPECT_EQ(job.wait(), 1) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("supervisor process was killed"));
  expect_all_gone(job);
}

// The launcher may signal the supervisor, whose number must not be another process's by then.
TEST_F(Launcher, KilledSupervisorIsReapedAfterTheLastSignalToIt) {
  auto job = run(2, std::string(kFamily) + "wait");
  wait_for_families(job, 2);
  const pid_t supervisor = pids_after(job.out(), "supervisor").front();
  job.signal(SIGSTOP);
  ASSERT_TRUE(eventually([&] { return test::process_state(job.pid()) == 'T'; }));
  ::kill(supervisor, SIGKILL);
  for (const char* label : {"child", "escaped", "worker"}) {
    for (const pid_t pid : pids_after(job.out(), label)) {
      EXPECT_TRUE(eventually([&] { return is_gone(pid); })) << label;
    }
  }
  EXPECT_EQ(test::process_state(supervisor), 'Z');
  job.signal(SIGCONT);
  EXPECT_EQ(job.wait(), 1) << job.err();
  EXPECT_TRUE(eventually([&] { return is_gone(supervisor); }));
}

TEST_F(Launcher, AnyTwoOfItsProcessesKilledAtOnceLeaveNoProcess) {
  for (const char* spared : {"guard", "supervisor", "launcher"}) {
    SCOPED_TRACE(std::string("all but the ") + spared);
    auto job = run(2, std::string(kFamily) + "wait");
    wait_for_families(job, 2);
    std::map<std::string, pid_t> pids{{"launcher", job.pid()},
                                      {"guard", guard_of(job)},
                                      {"supervisor", pids_after(job.out(), "supervisor").at(0)}};
    ASSERT_NE(pids["launcher"], pids["guard"]);
    const pid_t left = pids.extract(spared).mapped();
    // None of them may see another's end before its own.
    for (const auto& process : pids) {
      ::kill(process.second, SIGSTOP);
      ASSERT_TRUE(eventually([&] { return test::process_state(process.second) == 'T'; }));
    }
    for (const auto& process : pids) ::kill(process.second, SIGKILL);
    EXPECT_NE(job.wait(), 0) << job.err();
    expect_all_gone(job);
    EXPECT_TRUE(eventually([&] { return has_ended(left); }));
    EXPECT_THAT(left_behind(), IsEmpty());
  }
}

TEST_F(Launcher, AJobWithoutItsGuardGoesOn) {
  auto job =
      run(1, "echo supervisor=$PPID; until [ -e $TMPDIR/go ]; do :; done; rm $TMPDIR/go; exit 3");
  job.wait_for("supervisor=");
  ::kill(guard_of(job), SIGKILL);
  const std::ofstream go(temporary_.path() / "go");
  EXPECT_EQ(job.wait(), 3) << job.err();
}

// What killall, pkill and pkill -f look at.
TEST_F(Launcher, OnlyTheLauncherHasTheCommandsName) {
  auto job = run(1, "echo supervisor=$PPID; exec sleep 1000");
  job.wait_for("supervisor=");
  for (const pid_t pid : {guard_of(job), pid_after(job.out(), "supervisor")}) {
    for (const char* file : {"comm", "cmdline"}) {
      std::ifstream stream("/proc/" + std::to_string(pid) + "/" + file);
      const std::string name(std::istreambuf_iterator<char>(stream), {});
      EXPECT_THAT(name, HasSubstr("job-")) << file;
      EXPECT_THAT(name, Not(HasSubstr("paceline"))) << file;
    }
  }
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 128 + SIGTERM) << job.err();
}

TEST_F(Launcher, WhatWorkersLeaveBehindEndsWithTheJob) {
  auto job = run(2, std::string(kFamily) + "exit 0");
  EXPECT_EQ(job.wait(), 0) << job.err();
  expect_all_gone(job);
}

TEST_F(Launcher, FailureEndsWholeFamilies) {
  auto job = run(2, std::string(kFamily) + R"(
    if [ $RANK = 1 ]; then
      until [ -e $TMPDIR/trapped ]; do :; done
      rm $TMPDIR/trapped
      exit 9
    fi
    trap '' TERM
    : > $TMPDIR/trapped
    wait; wait; wait)",
                 {"--stop-grace", "0.2"});
  EXPECT_EQ(job.wait(), 9) << job.err();
  expect_all_gone(job);
}

TEST_F(Launcher, InterruptIsPassedOn) {
  auto job = run(2, "trap 'echo caught; exit 0' INT; echo ready; while :; do sleep 0.01; done",
                 {"--stop-grace", "60"});
  for (const char* line : {"[rank0]: ready", "[rank1]: ready"}) job.wait_for(line);
  job.signal(SIGINT);
  EXPECT_EQ(job.wait(), 128 + SIGINT) << job.err();
  EXPECT_THAT(job.out(), HasSubstr("[rank0]: caught\n"));
  EXPECT_THAT(job.out(), HasSubstr("[rank1]: caught\n"));
  EXPECT_THAT(job.err(), HasSubstr("paceline: stopped by SIGINT\n"));
}

TEST_F(Launcher, SigtermIsPassedOn) {
  auto job = run(2, "echo ready; exec sleep 1000");
  for (const char* line : {"[rank0]: ready", "[rank1]: ready"}) job.wait_for(line);
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 128 + SIGTERM) << job.err();
}

TEST_F(Launcher, SuspendedWorkersEndTooWhenAsked) {
  auto job = run(1, "echo worker=$$; while :; do sleep 0.01; done", {"--stop-grace", "86400"});
  job.wait_for("worker=");
  const pid_t worker = pid_after(job.out(), "worker");
  ::kill(worker, SIGSTOP);
  ASSERT_TRUE(eventually([&] { return test::process_state(worker) == 'T'; }));
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 128 + SIGTERM) << job.err();
}

TEST_F(Launcher, EndsTheJobThoughItsOwnProcessesAreSuspended) {
  auto job = run(1, "echo supervisor=$PPID; exec sleep 1000");
  job.wait_for("supervisor=");
  for (const pid_t pid : {guard_of(job), pid_after(job.out(), "supervisor")}) {
    ::kill(pid, SIGSTOP);
    ASSERT_TRUE(eventually([&] { return test::process_state(pid) == 'T'; }));
  }
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 128 + SIGTERM) << job.err();
}

// As sandboxes do that know of no such call. Holds for the calling thread and what it starts.
bool refuse_pidfd_open() {
  std::array<sock_filter, 4> program{
      {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
       BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pidfd_open, 0, 1),
       BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
       BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)}};
  const sock_fprog filter{program.size(), program.data()};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0 &&
         ::syscall(SYS_pidfd_open, ::getpid(), 0) < 0 && errno == EPERM;
}

TEST_F(Launcher, DoesWithoutPidfds) {
  std::unique_ptr<ChildProcess> failing;
  std::unique_ptr<ChildProcess> killed;
  bool refused = false;
  std::thread([&] {
    refused = refuse_pidfd_open();
    failing.reset(new ChildProcess(run(3, "test $RANK = 1 && exit 7; exec sleep 1000")));
    killed.reset(new ChildProcess(run(2, std::string(kFamily) + "wait")));
  }).join();
  if (!refused) GTEST_SKIP() << "no seccomp filters here";
  EXPECT_EQ(failing->wait(), 7) << failing->err();
  wait_for_families(*killed, 2);
  killed->signal(SIGKILL);
  EXPECT_EQ(killed->wait(), 128 + SIGKILL);
  expect_all_gone(*killed);
}

TEST_F(Launcher, SecondInterruptKills) {
  auto job = run(2, "trap 'echo caught' INT; echo ready; while :; do sleep 0.01; done",
                 {"--stop-grace", "86400"});
  for (const char* line : {"[rank0]: ready", "[rank1]: ready"}) job.wait_for(line);
  job.signal(SIGINT);
  for (const char* line : {"[rank0]: caught", "[rank1]: caught"}) job.wait_for(line);
  job.signal(SIGINT);
  EXPECT_EQ(job.wait(), 128 + SIGINT) << job.err();
}

TEST_F(Launcher, TheSecondInterruptKillsWhateverCameBefore) {
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

// The pipes of rank 0 that lead to the terminal are told by their inodes.
TEST_F(Launcher, TellsRankZeroOfTheTerminal) {
  auto terminal = test::open_terminal(72);
  if (!terminal) GTEST_SKIP() << "no terminal: openpty: " << std::strerror(errno);
  auto job =
      run(2, "cd /proc/$$/fd; echo told=$PACELINE_TERMINAL=$(stat -Lc %i 1),$(stat -Lc %i 2)", {},
          {}, std::move(*terminal), true);
  EXPECT_EQ(job.wait(), 0);
  const std::string& text = job.out();
  const auto begin = text.find("[rank0]: told=") + 14;
  const auto middle = text.find('=', begin);
  ASSERT_NE(middle, text.npos) << text;
  const auto columns = text.find(',', begin);
  EXPECT_EQ(text.substr(begin, columns - begin), "63");
  EXPECT_EQ(text.substr(columns + 1, middle - columns - 1),
            text.substr(middle + 1, text.find_first_of("\r\n", middle) - middle - 1));
  EXPECT_THAT(text, HasSubstr("[rank1]: told=="));
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

TEST_F(Launcher, ProgramsThatCannotBeStartedAreNamed) {
  const test::TemporaryDirectory directory;
  const auto script = directory.path() / "script";
  std::ofstream(script) << "#!/no/such/interpreter\n";
  auto plain = paceline({"run", script.string()});
  EXPECT_EQ(plain.wait(), 126);
  EXPECT_THAT(plain.err(), HasSubstr("script is not executable"));
  auto missing = paceline({"run", "--nproc-per-node", "2", "no-such-program"});
  EXPECT_EQ(missing.wait(), 127);
  EXPECT_EQ(missing.err(), "paceline run: program 'no-such-program' not found on PATH\n");

  std::filesystem::permissions(script, std::filesystem::perms::owner_all);
  auto broken = paceline({"run", script.string()});
  EXPECT_EQ(broken.wait(), 1);
  EXPECT_THAT(broken.err(), HasSubstr("interpreter that its first line names may be missing"));
}

TEST_F(Launcher, BadFlagsAreNamed) {
  for (const auto& flags : std::vector<std::vector<std::string>>{{"--nproc-per-node", "0"},
                                                                 {"--nproc-per-node", "-3"},
                                                                 {"--nproc-per-node", "10000"},
                                                                 {"--nproc-per-node", "two"},
                                                                 {"--nnodes", "2"},
                                                                 {"--master-port", "70000"},
                                                                 {"--stop-grace", "-1"},
                                                                 {"--stop-grace", "nan"},
                                                                 {"--master-port", "x"},
                                                                 {"--failure-grace", "5s"},
                                                                 {"--pass-local-rank=1"},
                                                                 {"--no-such-flag"}}) {
    std::vector<std::string> arguments{"run"};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    arguments.emplace_back("true");
    auto command = paceline(arguments);
    EXPECT_EQ(command.wait(), 2) << flags[0];
    EXPECT_THAT(command.err(), HasSubstr(flags[0]));
    EXPECT_THAT(command.err(), Not(HasSubstr("processes, ")));
  }
}

TEST_F(Launcher, ErrorsSayWhatIsExpected) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> errors{
      {{"ruin"}, "paceline: unknown command 'ruin'; expected run, report or bench\n"},
      {{"run"}, "paceline run: no program given: paceline run [flags] PROGRAM [arguments]\n"},
      {{"run", "--nope", "true"}, "paceline run: unknown flag --nope\n"},
      {{"run", "--master-port"}, "paceline run: --master-port: expected a value\n"},
      {{"run", "--master-port=", "true"}, "paceline run: --master-port=: expected a value\n"},
      {{"run", "--master-port", "x", "true"},
       "paceline run: --master-port x: expected a number from 1 to 65535\n"},
      {{"run", "--nproc-per-node=0", "true"},
       "paceline run: --nproc-per-node 0: expected a number from 1 to 1024, auto or cpu\n"},
      {{"run", "--stop-grace", "5s", "true"},
       "paceline run: --stop-grace 5s: expected 0 to 86400 seconds\n"}};
  for (const auto& [arguments, message] : errors) {
    auto command = paceline(arguments);
    EXPECT_EQ(command.wait(), 2);
    EXPECT_THAT(command.err(), StartsWith(message));
    EXPECT_THAT(command.err(), EndsWith(" --help' for help.\n"));
  }
}

TEST_F(Launcher, HelpAndMissingCommands) {
  auto help = paceline({});
  EXPECT_EQ(help.wait(), 0);
  EXPECT_THAT(help.out(), HasSubstr("Usage: paceline COMMAND"));
  auto run_help = paceline({"run", "-h"});
  EXPECT_EQ(run_help.wait(), 0);
  EXPECT_THAT(run_help.out(), HasSubstr("--nproc-per-node N"));
  EXPECT_THAT(run_help.out(), HasSubstr("--no-tune-malloc"));
  auto unknown = paceline({"ruin"});
  EXPECT_EQ(unknown.wait(), 2);
  EXPECT_THAT(unknown.err(), HasSubstr("'ruin'"));
  // Beside a copy of the command there is no bench.
  const test::TemporaryDirectory directory;
  const auto copy = directory.path() / "paceline";
  std::filesystem::copy(PACELINE_COMMAND, copy);
  ChildProcess bench({copy.string(), "bench"});
  EXPECT_EQ(bench.wait(), 2);
  EXPECT_THAT(bench.err(), HasSubstr("paceline bench is not installed"));
}

}  // namespace
}  // namespace paceline
