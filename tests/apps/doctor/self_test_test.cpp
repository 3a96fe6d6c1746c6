// The self-test's end of ranks that fail, with shell programs in their place.
#include "self_test/job.h"

#include <gmock/gmock.h>

#include <chrono>
#include <string>

namespace paceline::doctor {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

SelfTest run_script(const std::string& script, std::chrono::seconds deadline = 60s) {
  return run_self_test("some", {"sh", "-c", script}, deadline);
}

TEST(SelfTest, ReadsTheTimesOfRankZero) {
  const SelfTest test = run_script(
      R"(echo "rank $RANK of $WORLD_SIZE" >&2
         if [ "$RANK" = 0 ]; then echo '{"init_ms": 12.5, "all_reduce_us": 3}'; else echo x; fi)");
  ASSERT_TRUE(test.times) << test.error;
  EXPECT_EQ(test.backend, "some");
  EXPECT_EQ(test.times->init_ms, 12.5);
  EXPECT_EQ(test.times->all_reduce_us, 3);
}

TEST(SelfTest, ReportsTheRankThatFailed) {
  const SelfTest failed = run_script("[ $RANK = 0 ] || { echo the reason >&2; exit 3; }");
  EXPECT_FALSE(failed.times);
  EXPECT_THAT(failed.error, AllOf(StartsWith("rank 1 "), HasSubstr("3"), HasSubstr("the reason")));
  const SelfTest recorded = run_script(
      R"([ $RANK = 1 ] || { echo '{"message": "its text"}' >"$TORCHELASTIC_ERROR_FILE"; exit 1; })");
  EXPECT_EQ(recorded.error, "rank 0: its text");
  EXPECT_THAT(run_script("kill -SEGV $$").error, HasSubstr("SIGSEGV"));
}

TEST(SelfTest, ReportsARankZeroWithoutAResult) {
  EXPECT_EQ(run_script("echo nonsense").error, "rank 0 wrote no result: nonsense");
  EXPECT_EQ(run_script("true").error, "rank 0 wrote no result");
  EXPECT_FALSE(from_line(R"({"init_ms": "x", "all_reduce_us": 3})"));
  EXPECT_FALSE(from_line("[]"));
}

TEST(SelfTest, EndsRanksAtTheDeadline) {
  const SelfTest asleep = run_script("echo waits; sleep 1000", 1s);
  EXPECT_EQ(asleep.error, "two ranks did not end within 1 s: waits");
  EXPECT_EQ(asleep.signal, 0);
  EXPECT_THAT(run_script("kill -STOP $$", 1s).error, HasSubstr("did not end within 1 s"));
  EXPECT_THAT(run_script("trap '' ALRM TERM; while :; do sleep 1; done", 1s).error,
              HasSubstr("did not end within 1 s"));
}

TEST(SelfTest, ReportsAProgramThatCannotBeStarted) {
  EXPECT_THAT(run_self_test("some", {"/no/such/program"}, 60s).error,
              HasSubstr("/no/such/program"));
}

}  // namespace
}  // namespace paceline::doctor
