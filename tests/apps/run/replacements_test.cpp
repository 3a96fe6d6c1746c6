// Processes that fail and are started again while the others go on.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "launcher.h"

namespace paceline {
namespace {

using test::Launcher;
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

TEST_F(Launcher, AFailureWithoutAReplacementEndsTheJob) {
  auto job = run(2, "if [ $RANK = 0 ]; then while :; do sleep 0.01; done; else exit 3; fi",
                 {"--max-replacements=2", "--max-restarts=1"});
  EXPECT_EQ(job.wait(), 3);
  const std::string twice =
      "paceline: rank 1 exited with code 3; started again, replacement 1 of 2\n"
      "paceline: rank 1 exited with code 3; started again, replacement 2 of 2\n"
      "paceline: rank 1 failed first: exited with code 3\n"
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

TEST_F(Launcher, AReplacedProcessKeepsItsErrorToItself) {
  const TemporaryDirectory logs;
  auto job = run(2,
                 "if [ $RANK = 0 ]; then exit 0; fi; "
                 "if [ -n \"$PACELINE_REPLACEMENT\" ]; then exit 4; fi; "
                 "echo '{\"message\": \"disk full\"}' > $TORCHELASTIC_ERROR_FILE; exit 1",
                 {"--max-replacements=1", "--log-dir", logs.path().string()});
  EXPECT_EQ(job.wait(), 4);
  EXPECT_THAT(job.err(), HasSubstr("paceline: rank 1 exited with code 1; started again, "
                                   "replacement 1 of 1\n  error: disk full\n"
                                   "paceline: rank 1 failed first: exited with code 4\n"
                                   "  rank 0: exited with code 0\n"));
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
  EXPECT_EQ(job.wait(), 1);
  EXPECT_THAT(job.err(), HasSubstr(fmt::format("cannot start {}: No such file or directory",
                                               program.string())));
}

}  // namespace
}  // namespace paceline
