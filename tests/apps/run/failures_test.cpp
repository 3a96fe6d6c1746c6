// The real `paceline` with small shell programs as workers: whose failure ends a job, and how the
// others end.
#include <gmock/gmock.h>

#include <csignal>
#include <string>
#include <utility>

#include "launcher.h"
#include "support/rank_here.h"

namespace paceline {
namespace {

using test::eventually;
using test::Launcher;
using test::pid_after;
using test::rank_here;
using ::testing::HasSubstr;

TEST_F(Launcher, ExitsWithTheCodeOfTheFirstFailure) {
  auto job = run(3, "test $RANK = 1 && { echo last words; exit 7; }; exec sleep 1000",
                 {"--stop-grace", "60"});
  EXPECT_EQ(job.wait(), 7) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("paceline: " + rank_here(1) +
                                   " failed first: exited with code 7\n"
                                   "  last lines of rank 1:\n"
                                   "    | last words\n"
                                   "  ranks 0, 2: stopped by SIGTERM\n"));
}

TEST_F(Launcher, ReportsDeathBySignalByName) {
  auto job = run(2, "test $RANK = 0 && kill -KILL $$; exec sleep 1000");
  EXPECT_EQ(job.wait(), 128 + SIGKILL) << job.err();
  EXPECT_THAT(job.err(),
              HasSubstr(rank_here(0) + " failed first: killed by SIGKILL (often the kernel's"));
}

TEST_F(Launcher, ReportsErrorFilesAndTheRankAtFault) {
  // Rank 0 is certainly gone first, and says that it was because of rank 1.
  const std::string script = R"(
    if [ $RANK = 0 ]; then
      printf '{"message": {"message": "lost", "extraInfo": {"blamed_ranks": [1]}}}' > $ERROR
      echo gone > $TMPDIR/go; exit 1
    fi
    until [ -e $TMPDIR/go ]; do :; done
    rm $TMPDIR/go
    printf '{"message": {"message": "the real reason"}}' > $ERROR
    exit 5)";
  // The second one is for errors that cannot be written to the first.
  for (const char* const place : {"$TORCHELASTIC_ERROR_FILE", "/proc/self/fd/$PACELINE_ERROR_FD"}) {
    auto job = run(2, "ERROR=" + std::string(place) + script, {"--failure-grace", "60"});
    EXPECT_EQ(job.wait(), 5) << job.err();
    EXPECT_THAT(job.err(), HasSubstr(rank_here(1) + " failed first: exited with code 5\n"
                                                    "  error: the real reason\n"
                                                    "  rank 0: exited with code 1: lost\n"));
  }
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

TEST_F(Launcher, WaitsForARankAtFaultToEndByItself) {
  auto job = run(2, "blamed=1; fail() { :; }" + std::string(kRank1EndsSlowly),
                 {"--failure-grace", "0", "--stop-grace", "20"});
  EXPECT_EQ(job.wait(), 5) << job.err();
  EXPECT_THAT(job.err(), HasSubstr(rank_here(1) + " failed first: exited with code 5\n"
                                                  "  rank 0: exited with code 1: lost\n"));
}

TEST_F(Launcher, WaitsForARankWithAnErrorFileToEndByItself) {
  auto job = run(2,
                 "fail() { printf '{\"message\": \"full\"}' > $TORCHELASTIC_ERROR_FILE; }" +
                     std::string(kRank1EndsSlowly),
                 {"--failure-grace", "0", "--stop-grace", "20"});
  EXPECT_EQ(job.wait(), 1) << job.err();
  EXPECT_THAT(job.err(),
              HasSubstr(rank_here(0) + " failed first: exited with code 1\n  error: lost\n"
                                       "  rank 1: exited with code 5: full\n"));
}

TEST_F(Launcher, StopsARankAtFaultThatDoesNotEnd) {
  auto job = run(
      2,
      "blamed=1; fail() { : > $TMPDIR/failing; exec sleep 1000; }" + std::string(kRank1EndsSlowly),
      {"--failure-grace", "0", "--stop-grace", "0.2"});
  EXPECT_EQ(job.wait(), 1) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("rank 1: stopped by SIGTERM\n"));
}

TEST_F(Launcher, GivesOtherRanksTimeToReportTheirErrors) {
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

TEST_F(Launcher, SendsSigtermAfterTheFailureGrace) {
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

TEST_F(Launcher, KillsRanksThatIgnoreSigterm) {
  auto job = run(2, "fail() { exit 3; }; trap '' TERM" + std::string(kRank1FailsLater),
                 {"--failure-grace", "0.1", "--stop-grace", "0.2"});
  EXPECT_EQ(job.wait(), 3) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("rank 0: stopped by SIGKILL\n"));
}

TEST_F(Launcher, OrdersFailuresByTimeEvenIfNoticedLate) {
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
  EXPECT_THAT(job.err(), HasSubstr(rank_here(1) + " failed first: killed by SIGSEGV"));
}

}  // namespace
}  // namespace paceline
