// What the log says of ranks that keep others waiting.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include <paceline/error.h>

#include "shm/buckets/bucket_reducer.h"
#include "shm/collectives/group.h"
#include "shm/collectives/monitored_barrier.h"
#include "shm/p2p/mailbox.h"
#include "support/bucket_steps.h"
#include "support/log_lines.h"
#include "support/process_ranks.h"
#include "support/shared.h"
#include "support/stopped.h"
#include "support/thread_ranks.h"

namespace paceline::shm {
namespace {

using namespace std::chrono_literals;
using test::run_thread_ranks;
using test::small_region;
using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::ContainsRegex;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::MatchesRegex;
using ::testing::Not;
using ::testing::StartsWith;

// The first report usually has all ranks that come to the wait; else a later one has.
constexpr std::chrono::milliseconds kFirst{1500};

// Exactly one line is the report `line`. Those before it, on a busy machine, are reports of fewer
// ranks; the last one is about the end of the wait.
void expect_reported_once(const std::vector<std::string>& lines, const std::string& line,
                          const std::string& end) {
  EXPECT_THAT(lines, Contains(MatchesRegex(line)).Times(1));
  EXPECT_THAT(lines, Each(AnyOf(MatchesRegex(line), MatchesRegex("ranks? .* waited .*"),
                                MatchesRegex(end + " went on after .* s"))));
  ASSERT_FALSE(lines.empty());
  EXPECT_THAT(lines.back(), MatchesRegex(end + " went on after .* s"));
}

TEST(LateRanks, AreReportedByOneOfTheRanksThatWait) {
  const test::LogLines log(kFirst);
  const std::string report =
      "ranks 4, 7 and 1023 have waited .* s for rank 70 at all_reduce of 10 float32, call 2 of "
      "group test; rank 70: its last was call 1, barrier";
  auto options = small_region();
  options.global_ranks = GlobalRanks({4, 7, 70, 1023});
  run_thread_ranks(
      4,
      [&](auto region) {
        Group group(region);
        group.barrier();
        if (region->rank() == 2) {
          EXPECT_TRUE(log.wait_for_line(report));
        }
        std::vector<float> data(10);
        group.all_reduce(data.data(), data.data(), data.size(), DataType::float32, ReduceOp::sum);
      },
      options);
  expect_reported_once(log.all(), report, "all_reduce of 10 float32, call 2 of group test");
}

TEST(LateRanks, AreNotReportedIfNobodyWaitsForLong) {
  const test::LogLines log(1min);
  run_thread_ranks(3, [](auto region) {
    Group group(region);
    for (int i = 0; i < 100; ++i) group.barrier();
  });
  EXPECT_THAT(log.all(), IsEmpty());
}

TEST(LateRanks, AreNotSaidToGoOnAfterATimeout) {
  const test::LogLines log(50ms);
  run_thread_ranks(2, [](auto region) {
    Group group(region);
    group.barrier();
    if (region->rank() == 1) {
      while (!region->failed()) std::this_thread::yield();
      return;
    }
    group.set_timeout(1s);
    EXPECT_THROW(group.barrier(), Timeout);
  });
  EXPECT_THAT(log.all(), Not(IsEmpty()));
  for (const std::string& line : log.all()) EXPECT_THAT(line, StartsWith("rank 0 has waited"));
}

TEST(LateRanks, AreNotSaidToGoOnAfterAMismatch) {
  const test::LogLines log(100ms);
  run_thread_ranks(2, [&](auto region) {
    Group group(region);
    if (region->rank() == 1) {
      EXPECT_TRUE(log.wait_for_line());
    }
    std::vector<float> data(region->rank() == 0 ? 10 : 11);
    EXPECT_THROW(
        group.all_reduce(data.data(), data.data(), data.size(), DataType::float32, ReduceOp::sum),
        Mismatch);
  });
  EXPECT_THAT(log.all(), Each(StartsWith("rank 0 has waited")));
}

TEST(LateRanks, AreNotSaidToGoOnAfterADifferentStep) {
  const test::LogLines log(100ms);
  run_thread_ranks(2, [&](auto region) {
    Group group(region);
    BucketReducer reducer(group, test::kBuckets, test::bucket_name);
    const bool late = region->rank() == 1;
    reducer.begin_step({.forwards = late ? 2u : 1u});
    if (late) {
      EXPECT_TRUE(log.wait_for_line());
    }
    for (std::size_t bucket = 0; bucket < std::size(test::kBuckets); ++bucket)
      reducer.publish(bucket);
    EXPECT_THROW(reducer.finish(), Mismatch);
  });
  EXPECT_THAT(log.all(), Each(StartsWith("rank 0 has waited")));
}

TEST(LateRanks, InAStepAreReportedWithTheirBuckets) {
  const test::LogLines log(kFirst);
  const std::string report =
      "rank 2 has waited .* s for rank 1 at backward, step 1 of group test, bucket 0 "
      "\\(layer0\\); rank 0: it has 2 of 3 buckets ready, 0 \\(layer0\\) last; rank 1: it has 1 "
      "of 3 buckets ready, 2 \\(layer2\\) last; rank 2: it has 3 of 3 buckets ready, 1 "
      "\\(layer1\\) last";
  run_thread_ranks(3, [&](auto region) {
    Group group(region);
    BucketReducer reducer(group, test::kBuckets, test::bucket_name);
    reducer.begin_step({.forwards = 1});
    for (const std::size_t bucket : {2u, 0u, 1u}) {
      // Ranks 0 and 1 are late, rank 0 with its last bucket only.
      const bool late = region->rank() == 0 ? bucket == 1 : region->rank() == 1 && bucket == 0;
      if (late) {
        EXPECT_TRUE(log.wait_for_line(report));
      }
      test::fill_bucket(reducer, bucket, test::value_of(region->rank(), 1, bucket));
      reducer.publish(bucket);
    }
    reducer.finish();
    test::check_step(reducer, 3, 1);
  });
}

TEST(LateRanks, InAMonitoredBarrierAreReportedOnce) {
  const test::LogLines log(kFirst);
  const std::string report =
      "ranks 0, 1 and 3 have waited .* s for rank 2 at monitored_barrier 2 of group test";
  run_thread_ranks(4, [&](auto region) {
    MonitoredBarrier barrier(region);
    barrier.pass(1min, true);
    if (region->rank() == 2) {
      EXPECT_TRUE(log.wait_for_line(report));
    }
    barrier.pass(1min, true);
  });
  expect_reported_once(log.all(), report, "monitored_barrier 2 of group test");
}

TEST(LateRanks, OfMessagesAreReportedByTheRankThatWaits) {
  const test::LogLines log(200ms);
  run_thread_ranks(3, [&](auto region) {
    Mailbox mailbox(region);
    std::vector<int> data(3);
    std::atomic<bool> done{false};
    const auto end = [&](const std::exception_ptr& error, int) {
      EXPECT_FALSE(error);
      done = true;
    };
    Mailbox::Message message{data.data(), 3, DataType::int32, 2, 5, 1min};
    if (region->rank() == 1) return region->check_usable({"test", 0});
    if (region->rank() == 2) {
      EXPECT_TRUE(log.wait_for_line());
      message.peer = 0;
      mailbox.send(message, end);
      return mailbox.pump([&] { return done.load(); });
    }
    mailbox.receive(message, end);
    mailbox.pump_for(message, false, [&] { return done.load(); });
  });
  const auto lines = log.all();
  ASSERT_GE(lines.size(), 2u);
  EXPECT_THAT(lines.front(), MatchesRegex("rank 0 has waited .* s for rank 2 at recv of 3 int32 "
                                          "from rank 2 with tag 5 in group test"));
  EXPECT_THAT(lines.back(), MatchesRegex("recv of 3 int32 from rank 2 with tag 5 in group test "
                                         "went on after .* s"));
}

// Waits in a message for another rank until the group fails.
void wait_for_message_of(const std::shared_ptr<Region>& region, int peer) {
  Mailbox mailbox(region);
  std::vector<int> data(3);
  std::atomic<bool> done{false};
  const Mailbox::Message message{data.data(), 3, DataType::int32, peer, 5, 1min};
  mailbox.receive(message, [&](const std::exception_ptr& error, int) {
    EXPECT_TRUE(error);
    done = true;
  });
  mailbox.pump_for(message, false, [&] { return done.load(); });
}

// Ranks 0 and 1 come to the barrier once each rank r from 2 on waits for rank awaited[r - 2], or
// for none if that is negative. Rank 0's Timeout.
Timeout timeout_of_barrier(const std::vector<int>& awaited) {
  std::optional<Timeout> thrown;
  run_thread_ranks(static_cast<int>(awaited.size()) + 2, [&](auto region) {
    Group group(region);
    const int rank = region->rank();
    const auto awaits = [&](int other) { return awaited[static_cast<std::size_t>(other) - 2]; };
    if (rank >= 2 && awaits(rank) >= 0) return wait_for_message_of(region, awaits(rank));
    if (rank >= 2) {
      while (!region->failed()) std::this_thread::yield();
      return;
    }
    for (int other = 2; other < region->size(); ++other) {
      while (awaits(other) >= 0 && !region->awaited_by(other)) std::this_thread::yield();
    }
    group.set_timeout(rank == 0 ? 1s : 1min);
    try {
      group.barrier();
      ADD_FAILURE() << "no error";
    } catch (const Timeout& error) {
      if (rank == 0) thrown = error;
    }
  });
  return thrown.value();
}

TEST(LateRanks, ThatWaitForOtherLateRanksAreNotBlamed) {
  const std::string begin =
      " did not arrive within the timeout of 1 s at barrier, call 1 of group test; ";
  const std::string nothing = "it has made no call yet";
  const Timeout row = timeout_of_barrier({3, -1});
  EXPECT_EQ(row.what(), "rank 3" + begin + "rank 2: " + nothing +
                            ", and it waits for rank 3; rank 3: " + nothing);
  EXPECT_THAT(row.ranks(), ElementsAre(3));
  // Rank 2 waits for one in the barrier.
  EXPECT_THAT(timeout_of_barrier({0, 2}).ranks(), ElementsAre(2));
  // In a circle.
  EXPECT_THAT(timeout_of_barrier({3, 2}).ranks(), ElementsAre(2, 3));
}

struct SharedState {
  test::Stopped victim;
  std::atomic<bool> awake{false};
};

// The ranks write one report together, though they are processes.
TEST(LateRanks, WhoseProcessesAreStoppedAreReportedAsStopped) {
  const test::Shared<SharedState> state;
  const std::string report =
      "ranks 0 and 2 have waited .* s for rank 1 at barrier, call 2 of group test; rank 1: its "
      "last "
      "was call 1, barrier, and its process [0-9]+ is stopped";
  const auto ends =
      test::run_process_ranks(3, [&](int rank, BootstrapSockets sockets) -> std::string {
        const test::LogLines log(kFirst);
        Group group(Region::create(std::move(sockets), rank, 3, small_region()));
        group.barrier();
        std::jthread waker;
        if (rank == 1) {
          state->victim.stop();
          state->awake = true;
        } else {
          waker = std::jthread([&] {
            EXPECT_TRUE(test::eventually([&] { return log.has(report) || state->awake; }));
            state->victim.wake();
          });
        }
        group.barrier();
        return fmt::format("{}", fmt::join(log.all(), "\n"));
      });
  for (const auto& end : ends) EXPECT_TRUE(end.exited_cleanly()) << end.report;
  EXPECT_EQ(ends[1].report, "");
  const std::string lines = ends[0].report + "\n" + ends[2].report;
  EXPECT_THAT(lines, ContainsRegex(report + "\nbarrier, call 2 of group test went on after .* s"));
  EXPECT_THAT(lines, Not(ContainsRegex(report + "(.|\n)*" + report))) << "one rank reports it";
}

TEST(LateRanks, ThatHaveNotJoinedAreReportedByRankZero) {
  const std::string report = "rank 0 has waited .* s for rank 2, which has not joined the group";
  const test::Shared<std::atomic<bool>> reported;
  const auto ends =
      test::run_process_ranks(3, [&](int rank, BootstrapSockets sockets) -> std::string {
        const test::LogLines log(kFirst);
        if (rank == 2) {
          EXPECT_TRUE(test::eventually([&] { return reported->load(); }));
        }
        std::jthread reporter;
        if (rank == 0) {
          reporter = std::jthread([&] {
            EXPECT_TRUE(log.wait_for_line(report));
            *reported = true;
          });
        }
        const auto region = Region::create(std::move(sockets), rank, 3, small_region());
        return fmt::format("{}", fmt::join(log.all(), "\n"));
      });
  for (const auto& end : ends) EXPECT_TRUE(end.exited_cleanly()) << end.report;
  EXPECT_THAT(ends[0].report, ContainsRegex(report + "\nforming the group went on after .* s"));
  EXPECT_EQ(ends[1].report + ends[2].report, "");
}

TEST(LateRanks, ReportThatRankZeroHasNotCome) {
  const test::Shared<std::atomic<bool>> reported;
  const auto ends =
      test::run_process_ranks(2, [&](int rank, BootstrapSockets sockets) -> std::string {
        const test::LogLines log(kFirst);
        if (rank == 0) {
          EXPECT_TRUE(test::eventually([&] { return reported->load(); }));
        }
        std::jthread reporter;
        if (rank == 1) {
          reporter = std::jthread([&] {
            EXPECT_TRUE(log.wait_for_line());
            *reported = true;
          });
        }
        const auto region = Region::create(std::move(sockets), rank, 2, small_region());
        return fmt::format("{}", fmt::join(log.all(), "\n"));
      });
  for (const auto& end : ends) EXPECT_TRUE(end.exited_cleanly()) << end.report;
  EXPECT_EQ(ends[0].report, "");
  EXPECT_THAT(ends[1].report, MatchesRegex("rank 1 has waited .* s for rank 0, which has not begun "
                                           "to form the group\nforming the group went on .*"));
}

}  // namespace
}  // namespace paceline::shm
