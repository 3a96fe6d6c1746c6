// Processes that fail and are started again while the others go on.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "launcher.h"
#include "support/rank_here.h"

namespace paceline {
namespace {

using test::Launcher;
using test::rank_here;
using test::TemporaryDirectory;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

std::string wait_for_file(const std::string& file) {
  return "while ! [ -e " + file + " ]; do sleep 0.01; done; ";
}

TEST_F(Launcher, ReplacesAProcessThatFailsWhileTheOthersGoOn) {
  const TemporaryDirectory shared;
  const std::string file = (shared.path() / "replaced").string();
  auto job = run(2,
                 "echo worker=$$ $PACELINE_REPLACEMENT/$PACELINE_MAX_REPLACEMENTS "
                 "$TORCHELASTIC_RESTART_COUNT; if [ $RANK = 0 ]; then " +
                     wait_for_file(file) +
                     "elif [ -z $PACELINE_REPLACEMENT ]; then kill -KILL $$; "
                     "elif [ $PACELINE_REPLACEMENT = 1 ]; then exit 3; else touch " +
                     file + "; fi",
                 {"--max-replacements", "4"});
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(test::pids_after(job.out(), "worker"), SizeIs(4));
  EXPECT_THAT(job.out(), ContainsRegex("\\[rank0\\]: worker=[0-9]+ /4 0\n"));
  EXPECT_THAT(job.out(), ContainsRegex("\\[rank1\\]: worker=[0-9]+ /4 0\n"));
  EXPECT_THAT(job.out(), ContainsRegex("\\[rank1\\]: worker=[0-9]+ 1/4 0\n"));
  EXPECT_THAT(job.out(), ContainsRegex("\\[rank1\\]: worker=[0-9]+ 2/4 0\n"));
  EXPECT_THAT(job.err(), HasSubstr("paceline: rank 1 killed by SIGKILL (often the kernel's "
                                   "out-of-memory killer); started again, replacement 1 of 4\n"
                                   "paceline: rank 1 exited with code 3; started again, "
                                   "replacement 2 of 4\n"));
  EXPECT_THAT(job.err(), Not(HasSubstr("failed first")));
}

// Leaves the error of a Timeout that names rank 1.
constexpr const char* kTimesOut =
    R"(printf '{"message": {"message": "late", "extraInfo": {"blamed_ranks": [1], )"
    R"("error": "Timeout"}}}' > $TORCHELASTIC_ERROR_FILE; exit 1; )";

TEST_F(Launcher, ReplacesAHangingProcessThatATimeoutNames) {
  const TemporaryDirectory shared;
  const std::string file = (shared.path() / "replaced").string();
  auto job = run(2,
                 "if [ -n \"$PACELINE_REPLACEMENT\" ]; then if [ $RANK = 1 ]; then touch " + file +
                     "; fi; " + wait_for_file(file) + "exit 0; fi; if [ $RANK = 0 ]; then " +
                     kTimesOut + "fi; while :; do sleep 0.01; done",
                 {"--max-replacements=2"});
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("paceline: rank 0 exited with code 1; started again, "
                                   "replacement 1 of 2\n  error: late\n"
                                   "paceline: rank 1 was killed, since rank 0 timed out waiting "
                                   "for it; started again, replacement 2 of 2\n"));
}

// The first process of rank 0 may mean the first one of rank 1.
TEST_F(Launcher, KillsNoHangingProcessThatMayNotBeTheOneThatIsNamed) {
  const TemporaryDirectory shared;
  const std::string younger = (shared.path() / "younger").string();
  const std::string last = (shared.path() / "last").string();
  auto job = run(2,
                 "if [ $RANK = 1 ]; then [ -n \"$PACELINE_REPLACEMENT\" ] || exit 3; touch " +
                     younger + "; " + wait_for_file(last) + "exit 0; fi; " +
                     wait_for_file(younger) + "[ -z \"$PACELINE_REPLACEMENT\" ] || touch " + last +
                     "; [ -e " + last + " ] || { " + kTimesOut + "}",
                 {"--max-replacements=9"});
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("replacement 2 of 9\n  error: late\n"));
  EXPECT_THAT(job.err(), Not(HasSubstr("replacement 3")));
}

TEST_F(Launcher, KillsNoHangingProcessThatCannotBeReplaced) {
  const TemporaryDirectory shared;
  const std::string file = (shared.path() / "last").string();
  auto job = run(2,
                 "if [ $RANK = 1 ]; then " + wait_for_file(file) +
                     "exit 0; fi; [ -z \"$PACELINE_REPLACEMENT\" ] || touch " + file + "; [ -e " +
                     file + " ] || { " + kTimesOut + "}",
                 {"--max-replacements=1"});
  EXPECT_EQ(job.wait(), 0) << job.err();
}

TEST_F(Launcher, AFailureWithoutAReplacementEndsTheJob) {
  auto job = run(2, "if [ $RANK = 0 ]; then while :; do sleep 0.01; done; else exit 3; fi",
                 {"--max-replacements=2", "--max-restarts=1"});
  EXPECT_EQ(job.wait(), 3);
  const std::string twice =
      "paceline: rank 1 exited with code 3; started again, replacement 1 of 2\n"
      "paceline: rank 1 exited with code 3; started again, replacement 2 of 2\n"
      "paceline: " +
      rank_here(1) +
      " failed first: exited with code 3\n"
      "  rank 0: stopped by SIGTERM\n";
  EXPECT_THAT(job.err(),
              HasSubstr(twice + "paceline: starts all processes again, restart 1 of 1\n" + twice));
}

TEST_F(Launcher, AReplacementHasTheDescriptorsOfTheProcessBefore) {
  const TemporaryDirectory logs;
  auto job = run(1,
                 "store=/proc/self/fd/$PACELINE_STORE_FD; cat; cat $store; echo kept >> $store; "
                 "echo sockets=$PACELINE_BOOTSTRAP_SOCKETS; echo error >&2; "
                 "[ -n \"$PACELINE_REPLACEMENT\" ] || exit 1",
                 {"--max-replacements=1", "--log-dir", logs.path().string(), "-r", "2"});
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(job.out(), "[rank0]: sockets=\n[rank0]: kept\n[rank0]: sockets=\n");
  const auto run_directory = *std::filesystem::directory_iterator(logs.path());
  std::ifstream log(run_directory.path() / "attempt_0" / "0" / "stderr.log");
  EXPECT_EQ(std::string(std::istreambuf_iterator(log), {}), "error\nerror\n");
}

// As on a full disk.
// Rank 1 and its replacement fail, the first with an error in `file`.
std::string failure_with_error_in(const char* file) {
  return fmt::format(
      "if [ $RANK = 0 ]; then while :; do sleep 0.01; done; fi; "
      "if [ -n \"$PACELINE_REPLACEMENT\" ]; then exit 4; fi; "
      "echo '{{\"message\": \"disk full\"}}' > {}; exit 1",
      file);
}

auto reports_the_error_once() {
  return HasSubstr(
      "paceline: rank 1 exited with code 1; started again, replacement 1 of 1\n"
      "  error: disk full\n"
      "paceline: " +
      rank_here(1) +
      " failed first: exited with code 4\n"
      "  rank 0: stopped by SIGTERM\n");
}

TEST_F(Launcher, ReportsTheErrorOfAReplacedProcessThatWentToMemory) {
  auto job =
      run(2, failure_with_error_in("/proc/self/fd/$PACELINE_ERROR_FD"), {"--max-replacements=1"});
  EXPECT_EQ(job.wait(), 4) << job.err();
  EXPECT_THAT(job.err(), reports_the_error_once());
}

TEST_F(Launcher, AReplacedProcessKeepsItsErrorToItself) {
  const TemporaryDirectory logs;
  auto job = run(2, failure_with_error_in("$TORCHELASTIC_ERROR_FILE"),
                 {"--max-replacements=1", "--log-dir", logs.path().string()});
  EXPECT_EQ(job.wait(), 4);
  EXPECT_THAT(job.err(), reports_the_error_once());
  const auto rank = std::filesystem::directory_iterator(logs.path())->path() / "attempt_0" / "1";
  EXPECT_TRUE(std::filesystem::exists(rank / "error_1.json"));
  EXPECT_FALSE(std::filesystem::exists(rank / "error.json"));
}

TEST_F(Launcher, ASignalEndsAJobWithReplacements) {
  auto job = run(2, "trap 'exit 5' TERM; echo worker=$$; while :; do sleep 0.01; done",
                 {"--max-replacements=9"});
  job.wait_for("[rank0]: worker=");
  job.wait_for("[rank1]: worker=");
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 128 + SIGTERM);
  EXPECT_THAT(job.err(), Not(HasSubstr("replacement")));
}

TEST_F(Launcher, NamesAProgramThatCannotBeStartedAgain) {
  const TemporaryDirectory directory;
  const auto program = directory.path() / "program";
  std::ofstream(program) << "#!/bin/sh\nrm $0\nexit 3\n";
  std::filesystem::permissions(program, std::filesystem::perms::owner_all);
  auto job = paceline({"run", "--max-replacements=1", program.string()});
  EXPECT_EQ(job.wait(), 3);
  EXPECT_THAT(job.err(), HasSubstr("paceline: rank 0 cannot be started again: No such file or "
                                   "directory (ENOENT)\npaceline: " +
                                   rank_here(0) + " exited with code 3\n"));
}

TEST_F(Launcher, ReplacesNoProcessOnceAnotherHasFinished) {
  const TemporaryDirectory shared;
  const std::string file = (shared.path() / "pid").string();
  auto job = run(2,
                 "if [ $RANK = 0 ]; then echo $$ > " + file + "; exit 0; fi; while ! [ -s " + file +
                     " ] || kill -0 $(cat " + file + ") 2>/dev/null; do sleep 0.01; done; exit 9",
                 {"--max-replacements=3"});
  EXPECT_EQ(job.wait(), 9);
  EXPECT_THAT(job.err(),
              HasSubstr("paceline: " + rank_here(1) + " failed first: exited with code 9\n"));
  EXPECT_THAT(job.err(), Not(HasSubstr("replacement")));
}

TEST_F(Launcher, ASignalEndsAJobWhoseProcessesAllFailAtOnce) {
  auto job = run(8, "exit 3", {"--max-replacements=100000"});
  job.wait_for("replacement 100 ");
  job.signal(SIGTERM);
  EXPECT_THAT(job.wait(), ::testing::AnyOf(3, 128 + SIGTERM));
  EXPECT_THAT(job.err(), Not(HasSubstr("replacement 50000 ")));
}

// The directory of the job goes with its last process.
TEST_F(Launcher, AKilledLauncherLeavesNoProcessesThatFailAtOnce) {
  auto job = run(8, "exit 3", {"--max-replacements=1000000"});
  job.wait_for("replacement 100 ");
  job.signal(SIGKILL);
  EXPECT_EQ(job.wait(), 128 + SIGKILL);
}

TEST_F(Launcher, ReportsEachReplacementAlsoIfItWasStopped) {
  const TemporaryDirectory shared;
  const std::string begin = (shared.path() / "begin").string();
  const auto end = shared.path() / "end";
  auto job = run(1,
                 "if [ -z \"$PACELINE_REPLACEMENT\" ]; then echo begins; " + wait_for_file(begin) +
                     "fi; if [ \"$PACELINE_REPLACEMENT\" = 600 ]; then touch " + end.string() +
                     "; exit 0; fi; exit 3",
                 {"--max-replacements=600"});
  job.wait_for("begins");
  job.signal(SIGSTOP);
  ASSERT_TRUE(test::eventually([&] { return test::process_state(job.pid()) == 'T'; }));
  std::ofstream(begin).close();
  ASSERT_TRUE(test::eventually([&] { return std::filesystem::exists(end); }));
  job.signal(SIGCONT);
  EXPECT_EQ(job.wait(), 0) << job.err();
  for (const int number : {1, 2, 300, 599, 600}) {
    EXPECT_THAT(job.err(), HasSubstr(fmt::format(" replacement {} of 600\n", number)));
  }
}

TEST_F(Launcher, KillsWhatAReplacedProcessHasLeftBehind) {
  const TemporaryDirectory shared;
  const std::string file = (shared.path() / "pid").string();
  auto job = run(1,
                 "if [ -z \"$PACELINE_REPLACEMENT\" ]; then sleep 1000 & echo $! > " + file +
                     "; exit 3; fi; while kill -0 $(cat " + file +
                     ") 2>/dev/null; do sleep 0.01; done; exit 0",
                 {"--max-replacements=1"});
  EXPECT_EQ(job.wait(), 0) << job.err();
}

TEST_F(Launcher, ReplacesNoProcessWhileTheJobIsSuspended) {
  // exec: a shell that is stopped with its child between vfork and exec never shows as stopped.
  auto job = run(1, "echo worker=$$; [ -n \"$PACELINE_REPLACEMENT\" ] || exec sleep 1000",
                 {"--max-replacements=1"});
  job.wait_for("worker=");
  const pid_t worker = test::pid_after(job.out(), "worker");
  job.signal(SIGTSTP);
  ASSERT_TRUE(test::eventually(
      [&] { return test::process_state(job.pid()) == 'T' && test::process_state(worker) == 'T'; }));
  ::kill(worker, SIGKILL);
  ASSERT_TRUE(test::eventually([&] { return test::is_gone(worker); }));
  job.signal(SIGCONT);
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(test::pids_after(job.out(), "worker"), SizeIs(2));
}

TEST_F(Launcher, TheReportHasTheLastLinesOfTheLastProcess) {
  for (const char* const streams : {"0", "3"}) {
    const TemporaryDirectory logs;
    auto job = run(1, "[ -n \"$PACELINE_REPLACEMENT\" ] || printf 'disk full'; exit 3",
                   {"--max-replacements=1", "--log-dir", logs.path().string(), "-r", streams});
    EXPECT_EQ(job.wait(), 3);
    EXPECT_THAT(job.out(), ::testing::AnyOf("[rank0]: disk full\n", ""));
    EXPECT_THAT(job.err(),
                ::testing::EndsWith("paceline: " + rank_here(0) + " exited with code 3\n"));
  }
}

}  // namespace
}  // namespace paceline
