#include "launch/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <string>
#include <vector>

#include "launch/job_result.h"
#include "launch/tail_buffer.h"

namespace paceline::launch {
namespace {

RankResult ended(int order, int status, bool stopped = false) {
  return {.status = status,
          .ended = std::chrono::nanoseconds(order),
          .stopped = stopped,
          .error = {},
          .last_lines = {}};
}

constexpr int exited(int code) {
  return code << 8;
}

TEST(FirstFailed, IsTheEarliestUnlessItBlamesAnother) {
  JobResult result;
  result.ranks = {ended(1, exited(1)), ended(2, SIGSEGV), ended(0, exited(0))};
  EXPECT_EQ(result.first_failed(), 0);
  EXPECT_EQ(result.exit_code(), 1);
  result.ranks[0].error = ErrorFile{"PeerLost", {1}};
  EXPECT_EQ(result.first_failed(), 1);
  EXPECT_EQ(result.exit_code(), 128 + SIGSEGV);
  result.ranks[0].error = ErrorFile{"blames itself and nobody", {0, 9, -2}};
  EXPECT_EQ(result.first_failed(), 0);
}

TEST(FirstFailed, IsABlamedRankThatEndedEarlyWithCodeZero) {
  JobResult result;
  result.ranks = {ended(1, exited(4)), ended(0, exited(0)), ended(2, exited(1))};
  result.ranks[0].error = ErrorFile{"rank 1 has left the group", {1}};
  EXPECT_EQ(result.first_failed(), 1);
  EXPECT_EQ(result.exit_code(), 4) << "not that of the culprit, which is 0";
  result.ranks[0].error = ErrorFile{"blames one that failed too", {1, 2}};
  EXPECT_EQ(result.first_failed(), 2);
  result.ranks[0].error = ErrorFile{"blames one that ended when told to", {1}};
  result.ranks[1].stopped = true;
  EXPECT_EQ(result.first_failed(), 0);
}

// As over Gloo.
TEST(FirstFailed, IsTheOneThatBlamesNobodyIfOthersDoNotKnow) {
  JobResult result;
  result.ranks = {ended(1, exited(1)), ended(0, exited(1)), ended(2, exited(1))};
  result.ranks[0].error = ErrorFile{"connection closed by peer", {kUnknownRank}};
  result.ranks[1].error = ErrorFile{"connection reset by peer", {kUnknownRank}};
  result.ranks[2].error = ErrorFile{"its own", {}};
  EXPECT_EQ(result.first_failed(), 2);
  result.ranks[2] = ended(2, exited(0));
  EXPECT_EQ(result.first_failed(), 2);
}

TEST(FirstFailed, ToleratesCircularBlame) {
  JobResult result;
  result.ranks = {ended(0, exited(3)), ended(1, exited(4))};
  result.ranks[0].error = ErrorFile{"", {1}};
  result.ranks[1].error = ErrorFile{"", {0}};
  EXPECT_EQ(result.first_failed(), 0);
}

TEST(FirstFailed, IsNoneIfTheLauncherWasInterrupted) {
  JobResult result;
  result.ranks = {ended(0, SIGINT, true), ended(1, exited(1), true)};
  result.signal = SIGINT;
  EXPECT_FALSE(result.first_failed());
  EXPECT_EQ(result.exit_code(), 130);
  EXPECT_EQ(failure_report(result), "paceline: stopped by SIGINT\n");
}

TEST(Preempted, IsIfAllRanksHaveEndedAndSomeWithItsCode) {
  JobResult result;
  result.ranks = {ended(1, exited(75)), ended(0, exited(0))};
  EXPECT_FALSE(result.first_failed());
  EXPECT_TRUE(result.preempted());
  EXPECT_EQ(result.exit_code(), 75);
  EXPECT_EQ(failure_report(result),
            "paceline: preempted: the processes have ended with code 75, to go on when they are "
            "started again\n");
  result.signal = SIGTERM;
  EXPECT_EQ(result.exit_code(), 75);
  result.ranks.push_back(ended(2, SIGTERM, true));
  EXPECT_FALSE(result.preempted());
  EXPECT_EQ(result.exit_code(), 128 + SIGTERM);
}

TEST(Preempted, IsNotIfARankHasFailed) {
  JobResult result;
  result.ranks = {ended(0, exited(75)), ended(1, exited(1))};
  EXPECT_FALSE(result.preempted());
  EXPECT_EQ(result.first_failed(), 1);
  EXPECT_EQ(result.exit_code(), 1);
  result.ranks[1].error = ErrorFile{"rank 0 has left the group", {0}};
  EXPECT_EQ(result.first_failed(), 0);
  EXPECT_EQ(result.exit_code(), 1);
  EXPECT_EQ(failure_report(result),
            "paceline: rank 0 ended early: exited with code 75 while other ranks needed it\n"
            "  rank 1: exited with code 1: rank 0 has left the group\n");
}

TEST(ToleratedLoss, DoesNotCountAsAFailure) {
  JobResult result;
  result.ranks = {ended(2, exited(0)), ended(0, SIGKILL), ended(1, exited(1)), ended(3, exited(0))};
  result.ranks[1].tolerated = result.ranks[2].tolerated = true;
  EXPECT_FALSE(result.first_failed());
  EXPECT_EQ(result.exit_code(), 0);
  EXPECT_EQ(failure_report(result), "paceline: ended without 2 of 4 ranks, which failed: 1, 2\n");
  result.ranks[0].status = exited(75);
  EXPECT_TRUE(result.preempted());
  result.ranks[0] = ended(4, exited(6));
  result.ranks[0].error = ErrorFile{"all were lost", {1, 2}};
  EXPECT_EQ(result.first_failed(), 0);
  EXPECT_EQ(result.exit_code(), 6);
}

TEST(FailureReport, IsOneBlock) {
  JobResult result;
  result.ranks = {ended(1, exited(1)), ended(0, SIGKILL), ended(3, SIGTERM, true),
                  ended(2, SIGTERM, true), ended(4, exited(0), true)};
  result.ranks[0].error = ErrorFile{"PeerLost: rank 1 has ended\nmore", {1}};
  result.ranks[1].error = ErrorFile{"two\nlines\n", {}};
  result.ranks[1].last_lines = {"step 1", "step 2"};
  EXPECT_EQ(failure_report(result),
            "paceline: rank 1 failed first: killed by SIGKILL (often the kernel's out-of-memory "
            "killer)\n"
            "  error: two\n"
            "         lines\n"
            "  last lines of rank 1:\n"
            "    | step 1\n"
            "    | step 2\n"
            "  rank 0: exited with code 1: PeerLost: rank 1 has ended\n"
            "  ranks 2, 3: stopped by SIGTERM\n"
            "  rank 4: exited with code 0 when asked to stop\n");
}

TEST(FailureReport, NamesARankThatEndedEarlyFirst) {
  JobResult result;
  result.ranks = {ended(1, exited(1)), ended(0, exited(0)), ended(2, exited(1))};
  result.ranks[0].error = result.ranks[2].error = ErrorFile{"rank 1 has left the group", {1}};
  result.ranks[1].last_lines = {"done"};
  EXPECT_EQ(failure_report(result),
            "paceline: rank 1 ended early: exited with code 0 while other ranks needed it\n"
            "  last lines of rank 1:\n"
            "    | done\n"
            "  ranks 0, 2: exited with code 1: rank 1 has left the group\n");
}

TEST(FailureReport, RepeatsNoErrorAmongTheLastLines) {
  for (const std::size_t size : {10, 2000}) {
    JobResult result;
    result.ranks = {ended(0, exited(1))};
    const std::string text(size, 'x');
    result.ranks[0].error = ErrorFile{text, {}};
    TailBuffer output;  // which clips long lines
    output.feed(Stream::err, "paceline error: " + text + "\n");
    result.ranks[0].last_lines = output.lines();
    EXPECT_THAT(failure_report(result), ::testing::Not(::testing::HasSubstr("last lines")));
  }
}

TEST(FailureReport, DistinguishesFailuresFromStops) {
  JobResult result;
  result.ranks = {ended(0, exited(1)), ended(1, SIGSEGV, true), ended(2, SIGTERM, true)};
  result.ranks[2].error = ErrorFile{"disk full", {}};
  EXPECT_EQ(failure_report(result),
            "paceline: rank 0 failed first: exited with code 1\n"
            "  rank 1: killed by SIGSEGV (an invalid memory access) when asked to stop\n"
            "  rank 2: stopped by SIGTERM: disk full\n");
}

// A terminal would obey them: change its title, clear the screen, ring.
TEST(FailureReport, EscapesControlCharactersOfErrorFiles) {
  JobResult result;
  result.ranks = {ended(0, exited(1)), ended(1, exited(1))};
  result.ranks[0].error = ErrorFile{std::string("a\tb\n\x1b]0;title\a\0\r\x7f \xC2\x9B"
                                                "2J \u00e9",
                                                25),
                                    {}};
  result.ranks[1].error = ErrorFile{"\n \r\n\x1b[2J\nmore", {}};
  EXPECT_EQ(failure_report(result),
            "paceline: rank 0 failed first: exited with code 1\n"
            "  error: a\tb\n"
            "         \\x1b]0;title\\x07\\x00\\x0d\\x7f \\u009b2J \u00e9\n"
            "  rank 1: exited with code 1: \\x1b[2J\n");
}

TEST(FailureReport, IsEmptyIfNothingFailed) {
  JobResult result;
  result.ranks = {ended(0, 0)};
  EXPECT_EQ(failure_report(result), "");
  EXPECT_EQ(result.exit_code(), 0);
}

}  // namespace
}  // namespace paceline::launch
