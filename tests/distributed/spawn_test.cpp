// spawn, in real processes, and forks without exec.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/child_process.h"
#include "support/temporary_directory.h"

namespace paceline {
namespace {

using test::ChildProcess;
using test::eventually;
using test::pid_after;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

using Environment = std::vector<std::pair<std::string, std::string>>;

class Spawn : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_TRUE(std::filesystem::is_empty(temporary_.path())); }

  ChildProcess run(std::vector<std::string> command, Environment environment = {}) {
    environment.emplace_back("TMPDIR", temporary_.path().string());
    return ChildProcess(std::move(command), environment);
  }
  // Runs the program to its end and returns its standard output.
  std::string output(std::vector<std::string> arguments, const Environment& environment = {},
                     int code = 0) {
    arguments.insert(arguments.begin(), SPAWN_PROGRAM);
    auto program = run(std::move(arguments), environment);
    EXPECT_EQ(program.wait(), code) << program.out() << program.err();
    return program.out();
  }

  test::TemporaryDirectory temporary_;
};

int occurrences(const std::string& text, const std::string& part) {
  int found = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

TEST_F(Spawn, CallsTheFunctionInEachOfNWorldsRanks) {
  for (const int ranks : {1, 2, 5, 8}) {
    const std::string out = output({"ranks", std::to_string(ranks), "", "two words"});
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_THAT(out, HasSubstr(fmt::format(
                           "rank {0}={0}/{1} local {0} node 0 sum {2} hello 42 arguments {1}||two "
                           "words stdin -1\n",
                           rank, ranks, ranks * (ranks + 1) / 2)));
    }
    EXPECT_EQ(occurrences(out, "hello"), ranks);
    EXPECT_EQ(occurrences(out, "parent goes on\n"), 1);
  }
}

TEST_F(Spawn, TrainsAsUnderPacelineRun) {
  const std::string spawned = output({"train"});
  EXPECT_THAT(spawned, StartsWith("parameters "));
  auto launched =
      run({PACELINE_COMMAND, "run", "--nproc-per-node", "2", SPAWN_PROGRAM, "train-launched"});
  EXPECT_EQ(launched.wait(), 0) << launched.err();
  EXPECT_EQ(launched.out(), "[rank0]: " + spawned);
}

TEST_F(Spawn, ThrowsTheFirstExceptionWithItsRankAndText) {
  const std::string out = output({"fail", "raise"});
  EXPECT_THAT(out, StartsWith("raised: rank 1: rank 1 failed first: exited with code 1\n"
                              "  error: the disk\n"
                              "         is full\n"));
  EXPECT_THAT(output({"fail", "raise-torch"}),
              AllOf(HasSubstr("raised: rank 1"), HasSubstr("no such tensor")));
  EXPECT_THAT(output({"fail", "raise-int"}),
              AllOf(HasSubstr("raised: rank 1"), HasSubstr("not a std::exception")));
}

TEST_F(Spawn, ThrowsTheSignalOrTheCodeOfARankWithoutAnException) {
  EXPECT_THAT(
      output({"fail", "kill"}),
      StartsWith("exited: rank 1, code -9, signal 'SIGKILL': rank 1 failed first: killed by "
                 "SIGKILL"));
  EXPECT_THAT(output({"fail", "exit"}), StartsWith("exited: rank 1, code 7, signal '': rank 1 "
                                                   "failed first: exited with code 7\n"));
  EXPECT_THAT(output({"fail", "exit-0"}),
              StartsWith("exited: rank 1, code 0, signal '': rank 1 ended early"));
  // Which the launcher takes for a job that was preempted.
  EXPECT_THAT(output({"fail", "exit-75"}), StartsWith("exited: rank 1, code 75, signal ''"));
}

TEST_F(Spawn, BlamesTheRankThatFailedAndNotTheOneThatEndedFirst) {
  const std::string out = output({"follower"});
  EXPECT_THAT(out, StartsWith("raised: rank 1: rank 1 failed first: exited with code 1\n"
                              "  error: the real reason\n"
                              "  rank 0: exited with code 1: "));
}

TEST_F(Spawn, KillsARankThatIgnoresSigterm) {
  EXPECT_THAT(output({"stubborn"}),
              AllOf(StartsWith("raised: rank 0"), HasSubstr("rank 1: stopped by SIGKILL")));
}

TEST_F(Spawn, LeavesNoRankIfTheParentIsKilled) {
  auto program = run({SPAWN_PROGRAM, "hang"});
  program.wait_for("rank0=");
  program.wait_for("rank1=");
  program.signal(SIGKILL);
  EXPECT_EQ(program.wait(), 128 + SIGKILL);
  for (const char* rank : {"rank0", "rank1"}) {
    const pid_t pid = pid_after(program.out(), rank);
    EXPECT_TRUE(eventually([&] { return test::has_ended(pid); })) << rank;
  }
}

TEST_F(Spawn, EndsAllByASignalToTheProcessGroup) {
  auto program = run({SPAWN_PROGRAM, "hang"});
  program.wait_for("rank0=");
  program.wait_for("rank1=");
  ::kill(-program.pid(), SIGINT);  // as Ctrl-C does
  EXPECT_EQ(program.wait(), 128 + SIGINT);
  for (const char* rank : {"rank0", "rank1"}) {
    const pid_t pid = pid_after(program.out(), rank);
    EXPECT_TRUE(eventually([&] { return test::has_ended(pid); })) << rank;
  }
}

TEST_F(Spawn, RunsTwoJobsAndOnlyTheParentGoesOn) {
  const std::string out = output({"twice"});
  for (const char* line : {"first 0\n", "first 1\n", "second 0\n", "second 1\n",
                           "parent after second\n", "second record\n"}) {
    EXPECT_EQ(occurrences(out, line), 1) << line << out;
  }
  // The processes of the second call pass the first one.
  EXPECT_EQ(occurrences(out, "parent after first\n"), 3) << out;
}

TEST_F(Spawn, SaysWhenMainDoesNotReachTheCall) {
  const std::string out = output({"retry"});
  EXPECT_THAT(out, AllOf(HasSubstr("usage: "), HasSubstr("ranks 0, 1 before it reached call 2")));
}

TEST_F(Spawn, SaysWhenMainDoesNotReachTheCallAfterAnErrorOfAnotherRecord) {
  EXPECT_THAT(output({"second-record"}),
              AllOf(HasSubstr("usage: "), HasSubstr("ranks 0, 1 before")));
}

TEST_F(Spawn, PassesTheArgumentsThatMainHasOverwritten) {
  const std::string out = output({"overwritten", "a,b,c"});
  EXPECT_THAT(out, AllOf(HasSubstr("rank 0 got a,b,c\n"), HasSubstr("rank 1 got a,b,c\n")));
}

TEST_F(Spawn, WritesNoErrorIntoAFileOfTheProgram) {
  const test::TemporaryDirectory directory;
  const auto file = directory.path() / "file";
  std::ofstream(file) << "data";
  auto program = run({SPAWN_PROGRAM, "reused-descriptor", file.string()});
  EXPECT_EQ(program.wait(), 0);
  EXPECT_THAT(program.out(),
              HasSubstr("(PACELINE_ERROR_FD), which spawn passes to its processes, is closed"));
  EXPECT_EQ(std::filesystem::file_size(file), 4u);
}

TEST_F(Spawn, IsAUsageErrorOutsideRecordAndOnAnotherThread) {
  EXPECT_THAT(output({"outside-record"}),
              AllOf(StartsWith("usage: "), HasSubstr("return paceline::record")));
  const std::string out = output({"invalid"});
  for (const char* text :
       {"nprocs = 0;", "nprocs = -1;", "nprocs = 1025; expected 1 to 1024", "another thread"}) {
    EXPECT_THAT(out, HasSubstr(text));
  }
  EXPECT_EQ(occurrences(out, "usage: "), 6);
  EXPECT_EQ(occurrences(out, "grace time of -1 ms"), 2);
}

TEST_F(Spawn, IsAUsageErrorInASpawnedProcess) {
  EXPECT_THAT(output({"nested"}), AllOf(StartsWith("raised: rank 0"),
                                        HasSubstr("in a process that spawn has started")));
}

TEST_F(Spawn, WorksInAProgramThatARankStarts) {
  const std::string out = output({"inner-program", SPAWN_PROGRAM});
  EXPECT_THAT(out, AllOf(HasSubstr("rank 0=0/2"), HasSubstr("rank 1=1/2")));
  EXPECT_EQ(occurrences(out, "parent goes on\n"), 1);
}

TEST_F(Spawn, EndsAWorldOfMainWithoutAnError) {
  auto program = run({SPAWN_PROGRAM, "world-in-main"});
  EXPECT_EQ(program.wait(), 0);
  EXPECT_THAT(program.out(), HasSubstr("rank 0 has left the group and is missing in barrier"));
  EXPECT_EQ(program.err(), "");
}

TEST_F(Spawn, RunsOnIfTheProgramStopsTheEndOfARank) {
  const std::string out = output({"swallow"});
  EXPECT_EQ(occurrences(out, "rank runs on\n"), 1);
  EXPECT_THAT(out, AllOf(HasSubstr("raised: "), HasSubstr("still told")));
}

TEST_F(Spawn, HidesTheFunctionsExceptionFromHandlersAroundTheCall) {
  EXPECT_THAT(output({"catch-errors"}),
              AllOf(StartsWith("caught in unset: "), Not(HasSubstr("caught in 0"))));
}

TEST_F(Spawn, LeavesNothingInTheParent) {
  const std::string out = output({"leave-nothing"});
  EXPECT_THAT(out, HasSubstr("after success: nothing\n"));
  EXPECT_THAT(out, HasSubstr("after failure: nothing\n"));
}

TEST_F(Spawn, WorksWhereSigchldIsIgnored) {
  const std::string out = output({"sigchld", "ignored"});
  EXPECT_THAT(out, AllOf(HasSubstr("exited: rank 1, code 7"), HasSubstr("ignored still\n")));
}

TEST_F(Spawn, EndsAllIfAnotherWaitTakesTheEndOfARank) {
  const std::string out = output({"sigchld", "thief"});
  EXPECT_THAT(out, AllOf(HasSubstr("error: the end of rank 1 "), HasSubstr("ECHILD")));
  // It may have been ended before it said its number.
  for (const pid_t pid : test::pids_after(out, "rank0")) EXPECT_TRUE(test::is_gone(pid));
}

TEST_F(Spawn, StartsProcessesWhileOtherThreadsRun) {
  EXPECT_THAT(output({"threads"}, {{"OMP_NUM_THREADS", "1"}}), HasSubstr("parent goes on\n"));
}

TEST_F(Spawn, WorksWithClosedStandardStreams) {
  auto program = run({"sh", "-c", "exec \"$0\" ranks 2 <&- 2>&-", SPAWN_PROGRAM});
  EXPECT_EQ(program.wait(), 0) << program.out();
  EXPECT_THAT(program.out(),
              AllOf(HasSubstr("rank 0=0/2"), HasSubstr("rank 1=1/2"), HasSubstr("parent goes on")));
  EXPECT_EQ(occurrences(program.out(), "stderr /dev/null\n"), 2) << program.out();
}

// The ranks of an outer job each start one of their own.
TEST_F(Spawn, PassesNothingOfAnOuterJob) {
  for (const bool one : {true, false}) {
    Environment environment{{"PACELINE_TIMELINE", (temporary_.path() / "outer").string()},
                            {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
    if (one) environment.emplace_back("ONE", "1");
    auto job = run({PACELINE_COMMAND, "run", "--nproc-per-node", "2", "--rdzv-id", "outer",
                    SPAWN_PROGRAM, "environment"},
                   environment);
    EXPECT_EQ(job.wait(), 0) << job.err();
    for (const char* outer : {"[rank0]: ", "[rank1]: "}) {
      EXPECT_THAT(job.out(),
                  HasSubstr(fmt::format("{}inner 0 RANK=0 WORLD_SIZE={} ", outer, one ? 1 : 2)));
    }
    EXPECT_EQ(occurrences(job.out(), "USE_AGENT_STORE=unset PACELINE_TERMINAL=unset"), one ? 2 : 4);
    EXPECT_EQ(occurrences(job.out(), "PACELINE_TIMELINE= "), one ? 2 : 4);
    EXPECT_EQ(occurrences(job.out(), "BOOTSTRAP_SOCKETS=unset"), one ? 2 : 0);
    EXPECT_THAT(job.out(), Not(HasSubstr("RUN_ID=outer")));
  }
}

TEST_F(Spawn, LeavesTheDebugServersSocketToTheParent) {
  const std::string socket = temporary_.path() / "socket";
  auto program = run({SPAWN_PROGRAM, "ranks", "2"}, {{"TORCH_WORKER_SERVER_SOCKET", socket}});
  EXPECT_EQ(program.wait(), 0);
  EXPECT_EQ(program.err(), "");
}

TEST_F(Spawn, SetsThreadsAndMallocAsPacelineRunDoes) {
  const std::string script =
      "echo OMP_NUM_THREADS=$OMP_NUM_THREADS MALLOC_TRIM_THRESHOLD_=$MALLOC_TRIM_THRESHOLD_";
  auto launched = run({PACELINE_COMMAND, "run", "--nproc-per-node", "2", "sh", "-c", script},
                      {{"OMP_NUM_THREADS", ""}});
  EXPECT_EQ(launched.wait(), 0);
  const std::string line = launched.out().substr(0, launched.out().find('\n'));
  const std::string expected = line.substr(line.find("OMP_"));
  EXPECT_EQ(occurrences(output({"environment"}, {{"OMP_NUM_THREADS", ""}}), expected), 2)
      << expected;
  EXPECT_EQ(occurrences(output({"environment"}, {{"OMP_NUM_THREADS", "3"}}), "OMP_NUM_THREADS=3 "),
            2);
}

class Forked : public Spawn {};

// Longer than a trial takes that hangs.
TEST_F(Forked, ChildIsNotRefusedBecauseTheMachineIsStalled) {
  auto program = run({SPAWN_PROGRAM, "forked", "stalled"});
  program.wait_for("trial=");
  const pid_t trial = pid_after(program.out(), "trial");
  EXPECT_TRUE(eventually([&] { return test::process_state(trial) == 'T'; }));
  std::this_thread::sleep_for(std::chrono::seconds(7));  // the input of this test
  ::kill(trial, SIGCONT);
  EXPECT_EQ(program.wait(), 0);
  EXPECT_THAT(program.out(), HasSubstr("child works\nchild ended with 0\n"));
}

TEST_F(Forked, ChildOfAThreadThatUsedIntraopThreadsIsRefused) {
  EXPECT_THAT(output({"forked", "use"}),
              AllOf(StartsWith("usage: "), HasSubstr("at::get_num_threads() = 4"),
                    HasSubstr("paceline::spawn"), HasSubstr("child ended with 0\n")));
}

TEST_F(Forked, ChildWorksWhereTheForkIsHarmless) {
  for (const char* after : {"nothing", "use-on-another-thread", "use-then-one-thread"}) {
    EXPECT_EQ(output({"forked", after}), "child works\nchild ended with 0\n") << after;
  }
}

TEST_F(Forked, ChildAfterCudaWasInitializedIsRefused) {
  EXPECT_THAT(
      output({"forked", "cuda", FAKE_CUDA_DRIVER}),
      AllOf(StartsWith("usage: "), HasSubstr("initialized CUDA"), HasSubstr("paceline::spawn")));
}

}  // namespace
}  // namespace paceline
