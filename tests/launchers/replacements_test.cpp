// Ranks that are killed and replaced while the others go on.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <signal.h>

#include <chrono>
#include <fstream>
#include <random>
#include <thread>

#include "launchers/trained.h"
#include "support/rank_here.h"
#include "support/temporary_directory.h"
#include "support/thoroughness.h"

namespace paceline {
namespace {

using test::ChildProcess;
using test::rank_here;
using ::testing::HasSubstr;

constexpr int kReplacedRanks = 3;

TEST(Replacements, TrainingComesToTheSameParametersThroughDeathsAtAnyMoment) {
  const int deaths = 6 * test::thoroughness();
  const test::TemporaryDirectory directory;
  const auto stop = (directory.path() / "stop").string();
  ChildProcess job({PACELINE_COMMAND, "run", fmt::format("--nproc-per-node={}", kReplacedRanks),
                    fmt::format("--max-replacements={}", deaths), TRAIN_PROGRAM, "replaced", stop});
  std::mt19937 random(std::random_device{}());
  std::uniform_int_distribution<int> delay(0, 400);
  std::uniform_int_distribution<int> rank(0, kReplacedRanks - 1);
  for (int one = 0; one < kReplacedRanks; ++one)
    job.wait_for(fmt::format("[rank{}]: started=", one));
  for (int death = 1; death <= deaths; ++death) {
    // Before the world is formed, while it is, and in training.
    std::this_thread::sleep_for(std::chrono::milliseconds(delay(random)));
    const auto label = fmt::format("[rank{}]: started", rank(random));
    ASSERT_EQ(::kill(test::pids_after(job.out(), label).back(), SIGKILL), 0) << job.out();
    job.wait_for(fmt::format(" ({})\n", death));
  }
  std::ofstream(stop).close();
  EXPECT_EQ(job.wait(), 0) << job.out() << job.err();
  EXPECT_THAT(job.err(), HasSubstr(fmt::format("replacement {} of {}\n", deaths, deaths)));
  test::expect_trained(job.out(), kReplacedRanks, test::pid_after(job.out(), "steps"));
}

// Workers are killed before they come, while they come, and in training. The last one is not
// replaced.
TEST(Replacements, AParameterServerGoesOnThroughDeathsAtAnyMoment) {
  const int deaths = 6 * test::thoroughness();
  const test::TemporaryDirectory directory;
  const auto stop = (directory.path() / "stop").string();
  ChildProcess job({PACELINE_COMMAND, "run", fmt::format("--nproc-per-node={}", kReplacedRanks),
                    fmt::format("--max-replacements={}", deaths), "--tolerate-loss", TRAIN_PROGRAM,
                    "served", stop});
  std::mt19937 random(std::random_device{}());
  std::uniform_int_distribution<int> delay(0, 400);
  const auto kill_later = [&](int rank) {
    std::this_thread::sleep_for(std::chrono::milliseconds(delay(random)));
    const auto label = fmt::format("[rank{}]: started", rank);
    EXPECT_EQ(::kill(test::pids_after(job.out(), label).back(), SIGKILL), 0) << job.out();
  };
  std::uniform_int_distribution<int> rank(1, kReplacedRanks - 1);
  for (int one = 0; one < kReplacedRanks; ++one)
    job.wait_for(fmt::format("[rank{}]: started=", one));
  for (int death = 1; death <= deaths; ++death) {
    kill_later(rank(random));
    job.wait_for(fmt::format(" ({})\n", death));
  }
  kill_later(1);
  job.wait_for("rank 1 killed by SIGKILL (often the kernel's out-of-memory killer); the others go");
  std::ofstream(stop).close();
  EXPECT_EQ(job.wait(), 0) << job.out() << job.err();
  EXPECT_THAT(job.err(), HasSubstr("ended without 1 of 3 ranks, which failed: 1\n"));
  EXPECT_EQ(test::pid_after(job.out(), "count"), test::pid_after(job.out(), "version"));
}

// A new one would begin anew, and nobody would notice.
TEST(Replacements, AParameterServerIsNotReplaced) {
  const test::TemporaryDirectory directory;
  ChildProcess job({PACELINE_COMMAND, "run", "--nproc-per-node=3", "--max-replacements=100",
                    "--tolerate-loss", TRAIN_PROGRAM, "served",
                    (directory.path() / "stop").string()});
  for (int rank = 0; rank < kReplacedRanks; ++rank)
    job.wait_for(fmt::format("[rank{}]: started=", rank));
  ASSERT_EQ(::kill(test::pid_after(job.out(), "[rank0]: started"), SIGKILL), 0);
  EXPECT_EQ(job.wait(), 137) << job.out() << job.err();
  EXPECT_THAT(job.err(), HasSubstr(rank_here(0) + " failed first: killed by SIGKILL"));
}

TEST(Replacements, AProgramOfFixedRanksIsRefused) {
  ChildProcess job({PACELINE_COMMAND, "run", "--nproc-per-node=2", "--max-replacements=1",
                    "--failure-grace=0", TRAIN_PROGRAM});
  EXPECT_EQ(job.wait(), 1);
  EXPECT_THAT(job.err(), HasSubstr("only a world with .enable_reconfigure can take it up"));
}

}  // namespace
}  // namespace paceline
