// Jobs that go on without processes that fail.
#include <gmock/gmock.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <string>

#include "launcher.h"
#include "support/rank_here.h"

namespace paceline {
namespace {

using test::Launcher;
using test::rank_here;
using test::TemporaryDirectory;
using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

// Rank 0 ends once the file exists.
std::string until(const std::filesystem::path& file) {
  return "if [ $RANK = 0 ]; then while ! [ -e " + file.string() +
         " ]; do sleep 0.01; done; exit; fi; ";
}

TEST_F(Launcher, GoesOnWithoutProcessesThatFail) {
  const TemporaryDirectory shared;
  const auto file = shared.path() / "end";
  auto job = run(4,
                 until(file) +
                     "if [ $RANK = 1 ]; then kill -KILL $$; fi; "
                     "if [ $RANK = 2 ]; then exit 3; fi; "
                     "while ! [ -e " +
                     file.string() + " ]; do sleep 0.01; done",
                 {"--tolerate-loss"});
  job.wait_for("rank 1 killed");
  job.wait_for("rank 2 exited");
  std::ofstream(file).close();
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(
      job.err(),
      AllOf(HasSubstr("paceline: rank 1 killed by SIGKILL (often the kernel's out-of-memory "
                      "killer); the others go on without it\n"),
            HasSubstr("paceline: rank 2 exited with code 3; the others go on without it\n"),
            EndsWith("paceline: ended without 2 of 4 ranks, which failed: 1, 2\n")));
}

TEST_F(Launcher, ReportsTheErrorOfAToleratedLoss) {
  auto job = run(2,
                 "[ $RANK = 0 ] || { echo '{\"message\": \"disk full\"}' > "
                 "$TORCHELASTIC_ERROR_FILE; exit 1; }",
                 {"--tolerate-loss"});
  EXPECT_EQ(job.wait(), 0);
  EXPECT_THAT(job.err(), HasSubstr("paceline: rank 1 exited with code 1; the others go on without "
                                   "it\n  error: disk full\n"));
}

TEST_F(Launcher, DoesNotGoOnWithoutRank0) {
  auto job = run(3, "if [ $RANK = 0 ]; then exit 4; fi; while :; do sleep 0.01; done",
                 {"--tolerate-loss"});
  EXPECT_EQ(job.wait(), 4);
  EXPECT_THAT(job.err(), HasSubstr("paceline: " + rank_here(0) +
                                   " failed first: exited with code 4\n"
                                   "  ranks 1, 2: stopped by SIGTERM\n"));
  EXPECT_THAT(job.err(), Not(HasSubstr("without")));
}

// Its error file blames a rank that runs on.
TEST_F(Launcher, TheErrorOfAToleratedLossDoesNotDelayTheEnd) {
  const TemporaryDirectory shared;
  const auto file = shared.path() / "end";
  auto job =
      run(3,
          "if [ $RANK = 2 ]; then echo '{\"message\": {\"message\": \"late\", "
          "\"extraInfo\": {\"blamed_ranks\": [1]}}}' > $TORCHELASTIC_ERROR_FILE; exit 3; fi; "
          "[ $RANK = 0 ] || exec sleep 1000; while ! [ -e " +
              file.string() + " ]; do sleep 0.01; done; exit 4",
          {"--tolerate-loss", "--failure-grace=0", "--stop-grace=86400"});
  job.wait_for("rank 2 exited with code 3; the others go on without it");
  std::ofstream(file).close();
  EXPECT_EQ(job.wait(), 4);
  EXPECT_THAT(job.err(), HasSubstr("  rank 1: stopped by SIGTERM\n"));
}

// Rank 0 fails because the others were lost; its error names them.
TEST_F(Launcher, ReportsRank0IfItFailsForLackOfTheOthers) {
  const TemporaryDirectory shared;
  const auto file = shared.path() / "end";
  auto job = run(2,
                 "if [ $RANK = 1 ]; then exit 3; fi; while ! [ -e " + file.string() +
                     " ]; do sleep 0.01; done; echo '{\"message\": \"all were lost\", "
                     "\"blamed_ranks\": [1]}' > $TORCHELASTIC_ERROR_FILE; exit 5",
                 {"--tolerate-loss"});
  job.wait_for("rank 1 exited with code 3; the others go on without it");
  std::ofstream(file).close();
  EXPECT_EQ(job.wait(), 5);
  EXPECT_THAT(job.err(), HasSubstr("paceline: " + rank_here(0) +
                                   " failed first: exited with code 5\n"
                                   "  error: all were lost\n"
                                   "  rank 1: exited with code 3\n"));
}

TEST_F(Launcher, ReplacesAsOftenAsItMayBeforeItGoesOnWithout) {
  const TemporaryDirectory shared;
  const auto file = shared.path() / "end";
  auto job = run(2, until(file) + "exit 3", {"--tolerate-loss", "--max-replacements=1"});
  job.wait_for("go on without it");
  std::ofstream(file).close();
  EXPECT_EQ(job.wait(), 0);
  EXPECT_THAT(job.err(),
              HasSubstr("paceline: rank 1 exited with code 3; started again, replacement 1 of 1\n"
                        "paceline: rank 1 exited with code 3; the others go on without it\n"
                        "paceline: ended without 1 of 2 ranks, which failed: 1\n"));
}

TEST_F(Launcher, ASignalEndsAJobThatToleratesLosses) {
  auto job = run(2, "trap 'exit 5' TERM; echo worker=$$; while :; do sleep 0.01; done",
                 {"--tolerate-loss"});
  job.wait_for("[rank0]: worker=");
  job.wait_for("[rank1]: worker=");
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 128 + SIGTERM);
  EXPECT_THAT(job.err(), Not(HasSubstr("without")));
}

}  // namespace
}  // namespace paceline
