// Jobs that are asked to end, save, and go on later.
#include <gmock/gmock.h>
#include <signal.h>

#include <climits>
#include <string>

#include "launchers/trained.h"
#include "support/temporary_directory.h"

namespace paceline {
namespace {

using test::ChildProcess;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

ChildProcess start_training(const test::TemporaryDirectory& directory, int ranks, int steps) {
  return ChildProcess({PACELINE_COMMAND, "run", "--nproc-per-node", std::to_string(ranks),
                       "--max-restarts=1", TRAIN_PROGRAM, "preempted", directory.path().string(),
                       std::to_string(steps)});
}

// All ranks of a job save at the same step, and the job goes on to the result of one without a
// break.
void expect_saved_and_resumed(ChildProcess& job, const test::TemporaryDirectory& directory,
                              int ranks) {
  EXPECT_EQ(job.wait(), 75) << job.out() << job.err();
  EXPECT_THAT(job.err(), AllOf(HasSubstr("paceline: preempted: "), Not(HasSubstr("restart"))));
  const auto saved = test::numbers_after(job.out(), "saved");  // 0: before the first step
  ASSERT_EQ(saved.size(), static_cast<std::size_t>(ranks)) << job.out();
  for (const int step : saved) EXPECT_EQ(step, saved[0]);
  auto rest = start_training(directory, ranks, saved[0] + 3);
  EXPECT_EQ(rest.wait(), 0) << rest.err();
  EXPECT_THAT(rest.out(), HasSubstr("resumed from step " + std::to_string(saved[0])));
  test::expect_trained(rest.out(), ranks, saved[0] + 3);
}

class PreemptionSignals : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(, PreemptionSignals, ::testing::Values(SIGTERM, SIGUSR1, SIGINT));

TEST_P(PreemptionSignals, ToTheLauncherReachAllRanks) {
  constexpr int kJobRanks = 3;
  const test::TemporaryDirectory directory;
  auto job = start_training(directory, kJobRanks, INT_MAX);
  for (const char* line : {"[rank0]: process", "[rank1]: process", "[rank2]: process"}) {
    job.wait_for(line);
  }
  job.signal(GetParam());
  expect_saved_and_resumed(job, directory, kJobRanks);
}

TEST(Preemption, OfOneRankEndsAllOfThem) {
  for (const int signal : {SIGTERM, SIGUSR1}) {
    const test::TemporaryDirectory directory;
    auto job = start_training(directory, 2, INT_MAX);
    job.wait_for("[rank1]: process");
    ::kill(test::pid_after(job.out(), "[rank1]: process"), signal);
    expect_saved_and_resumed(job, directory, 2);
  }
}

}  // namespace
}  // namespace paceline
