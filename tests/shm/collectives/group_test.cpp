#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <array>
#include <barrier>
#include <csignal>
#include <latch>
#include <memory>
#include <semaphore>
#include <thread>
#include <vector>

#include <paceline/error.h>

#include "shm/collectives/cross_wait.h"
#include "shm/collectives/group.h"
#include "shm/collectives/monitored_barrier.h"
#include "support/eventually.h"
#include "support/process_ranks.h"
#include "support/thoroughness.h"
#include "support/thread_ranks.h"

namespace paceline::shm {
namespace {

using test::run_thread_ranks;
using test::small_region;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

std::string mismatch(int size, const std::function<void(Group&)>& call,
                     std::vector<int>* culprits = nullptr) {
  std::vector<std::string> texts(static_cast<std::size_t>(size));
  run_thread_ranks(size, [&](auto region) {
    Group group(region);
    group.barrier();
    auto& text = texts[static_cast<std::size_t>(region->rank())];
    try {
      call(group);
      text = "no error";
    } catch (const Mismatch& error) {
      text = error.what();
      EXPECT_EQ(error.sequence(), 2u);
      if (culprits != nullptr && region->rank() == 0) *culprits = error.ranks();
    }
    EXPECT_THROW(group.barrier(), Mismatch) << "a failed group must refuse further calls";
  });
  for (const auto& text : texts) EXPECT_EQ(text, texts[0]);
  return texts[0];
}

TEST(Group, ErrorsNameGlobalRanks) {
  auto options = small_region();
  options.global_ranks = GlobalRanks({4, 70, 1023});
  run_thread_ranks(
      3,
      [](auto region) {
        Group group(region);
        std::vector<float> data(8);
        const std::size_t count = group.rank() == 1 ? 5 : 8;
        try {
          group.all_reduce(data.data(), data.data(), count, DataType::float32, ReduceOp::sum);
          ADD_FAILURE() << "no error";
        } catch (const Mismatch& error) {
          EXPECT_THAT(error.ranks(), ElementsAre(70));
          EXPECT_THAT(error.what(),
                      HasSubstr("ranks 4 and 1023 called all_reduce of 8 float32, rank 70 "
                                "all_reduce of 5 float32"));
        }
      },
      options);
}

TEST(Group, MismatchNamesTheCallsOnEveryRank) {
  std::vector<float> data(100);
  std::vector<std::vector<float>> own(3, std::vector<float>(100));
  const auto mine = [&](Group& group) {
    return own[static_cast<std::size_t>(group.rank())].data();
  };
  EXPECT_EQ(mismatch(2,
                     [&](Group& group) {
                       const std::size_t count = group.rank() == 0 ? 10 : 12;
                       group.all_reduce(mine(group), mine(group), count, DataType::float32,
                                        ReduceOp::sum);
                     }),
            "rank 0 called all_reduce of 10 float32, rank 1 all_reduce of 12 float32; call 2 of "
            "group test");
  std::vector<int> culprits;
  EXPECT_EQ(mismatch(
                3,
                [&](Group& group) {
                  if (group.rank() == 1) {
                    group.broadcast(mine(group), 5, DataType::byte, 1);
                  } else {
                    group.barrier();
                  }
                },
                &culprits),
            "ranks 0 and 2 called barrier, rank 1 broadcast of 5 bytes from rank 1; call 2 of "
            "group test");
  EXPECT_THAT(culprits, ElementsAre(1));
  EXPECT_THAT(mismatch(2,
                       [&](Group& group) {
                         group.all_reduce(mine(group), mine(group), 4, DataType::float32,
                                          group.rank() == 0 ? ReduceOp::max : ReduceOp::avg);
                       }),
              HasSubstr("with MAX, rank 1 all_reduce of 4 float32 with AVG"));
}

TEST(Group, TimeoutNamesTheLateRank) {
  run_thread_ranks(3, [](auto region) {
    Group group(region);
    group.barrier();
    if (region->rank() == 1) {
      // Comes only once the others have timed out.
      while (!region->failed()) std::this_thread::yield();
      EXPECT_THROW(group.barrier(), Timeout);
      return;
    }
    if (region->rank() == 0) {
      // Rank 2 has a long timeout, so it is never late itself, however busy the machine.
      while (!Region::reached(region->memory().slot(2, 2).round, 2)) std::this_thread::yield();
      group.set_timeout(std::chrono::milliseconds(200));
    }
    try {
      group.barrier();
      ADD_FAILURE() << "a barrier of two out of three";
    } catch (const Timeout& error) {
      EXPECT_THAT(error.ranks(), ElementsAre(1));
      EXPECT_STREQ(
          error.what(),
          "rank 1 did not arrive within the timeout of 0.2 s at barrier, call 2 of group test; "
          "rank 1: its last was call 1, barrier");
    }
  });
}

TEST(Group, TimeoutNamesTheLastCallOfTwoRounds) {
  run_thread_ranks(2, [](auto region) {
    Group group(region);
    group.barrier();
    std::vector<float> data(10'000);
    group.all_reduce(data.data(), data.data(), data.size(), DataType::float32, ReduceOp::sum);
    if (region->rank() == 1) {
      while (!region->failed()) std::this_thread::yield();
      return;
    }
    group.set_timeout(std::chrono::milliseconds(200));
    try {
      group.barrier();
      ADD_FAILURE() << "a barrier alone";
    } catch (const Timeout& error) {
      EXPECT_THAT(error.what(),
                  HasSubstr("rank 1: its last was call 2, all_reduce of 10000 float32"));
    }
  });
}

TEST(Group, PeerLostNamesTheRankThatLeft) {
  run_thread_ranks(2, [](auto region) {
    Group group(region);
    group.barrier();
    if (region->rank() == 1) return;
    region.reset();
    try {
      group.barrier();
      ADD_FAILURE() << "a barrier alone";
    } catch (const PeerLost& error) {
      EXPECT_THAT(error.ranks(), ElementsAre(1));
      EXPECT_STREQ(error.what(),
                   "rank 1 has left the group and is missing in barrier, call 2 of group test");
    }
  });
}

TEST(Group, PeerLostNamesTheRankThatExecutedAnotherProgram) {
  const auto ends =
      test::run_process_ranks(3, [](int rank, BootstrapSockets sockets) -> std::string {
        auto region = Region::create(std::move(sockets), rank, 3, small_region());
        Group group(region);
        const std::int64_t mine = ::getpid();
        std::vector<std::int64_t> pids(3);
        const std::vector<Output> outputs{{&pids[0], 1}, {&pids[1], 1}, {&pids[2], 1}};
        group.all_gather({&mine, 1}, outputs, DataType::int64);
        if (rank == 1) ::execlp("sleep", "sleep", "60", nullptr);
        std::string text = "no error";
        try {
          group.barrier();
        } catch (const PeerLost& error) {
          EXPECT_THAT(error.ranks(), ElementsAre(1));
          text = error.what();
        }
        if (rank == 0) ::kill(static_cast<pid_t>(pids[1]), SIGKILL);
        return text;
      });
  for (const int rank : {0, 2}) {
    EXPECT_THAT(ends[static_cast<std::size_t>(rank)].report,
                ::testing::MatchesRegex("rank 1 was lost \\(its process [0-9]+ executes another "
                                        "program\\) and is missing in barrier, call 2 of .*"));
  }
}

TEST(Group, AbortReachesPeersWithItsText) {
  run_thread_ranks(3, [](auto region) {
    Group group(region);
    group.barrier();
    if (region->rank() == 2) return region->abort("disk full");
    try {
      group.barrier();
      ADD_FAILURE() << "a barrier with a rank that aborted";
    } catch (const PeerLost& error) {
      EXPECT_THAT(error.ranks(), ElementsAre(2));
      EXPECT_STREQ(error.what(), "rank 2 left the group with an exception: disk full");
    }
  });
}

TEST(Group, RejectsInvalidArgumentsBeforeAnyOtherRankIsInvolved) {
  run_thread_ranks(2, [](auto region) {
    Group group(region);
    std::int64_t x = 1;
    if (group.rank() == 0) {
      EXPECT_THROW(group.all_reduce(&x, &x, 1, DataType::boolean, ReduceOp::avg), UsageError);
      EXPECT_THROW(group.all_reduce(&x, &x, 1, DataType::byte, ReduceOp::sum), UsageError);
      EXPECT_THROW(group.broadcast(&x, 1, DataType::int64, 2), UsageError);
    }
    group.all_reduce(&x, &x, 1, DataType::int64, ReduceOp::sum);
    EXPECT_EQ(x, 2);
  });
}

// Rank 1 publishes, round by round, that its parts are at an address where there is nothing.
TEST(Group, RejectsAnAddressOfPartsWhereRanksReadNoProcess) {
  for (const Operation operation : {Operation::broadcast, Operation::scatter}) {
    run_thread_ranks(2, [&](auto region) {
      const std::uint32_t rounds = operation == Operation::scatter ? 3 : 1;
      if (region->rank() == 1) {
        for (std::uint32_t round = 1; round <= rounds; ++round) {
          Slot& own = region->memory().slot(1, round);
          own.call = {.operation = operation, .root = 1, .count = 8, .sequence = 1, .inputs = 64};
          region->publish(own.round, round);
          const Word& other = region->memory().slot(0, round).round;
          while (!Region::reached(other, round)) std::this_thread::yield();
        }
        return;
      }
      Group group(region);
      std::array<std::byte, 8> data{};
      const auto call = [&] {
        if (operation == Operation::broadcast) {
          group.broadcast(data.data(), data.size(), DataType::byte, 1);
        } else {  // once more with staging buffers, after the refusal
          group.scatter({}, {data.data(), data.size()}, DataType::byte, 1);
        }
      };
      EXPECT_THAT(call, ThrowsMessage<Mismatch>(HasSubstr("rank 1 published an invalid call")));
    });
  }
}

TEST(Slice, CoversEveryElementOnceAlongCacheLines) {
  for (const std::size_t count : {0u, 1u, 15u, 16u, 17u, 1000u, 12345u}) {
    for (const int size : {1, 2, 3, 5, 8}) {
      std::size_t at = 0;
      for (int rank = 0; rank < size; ++rank) {
        const Slice slice = slice_of(count, 4, rank, size);
        EXPECT_EQ(slice.begin, at);
        EXPECT_TRUE(slice.begin % 16 == 0 || slice.begin == count);
        at = slice.end;
      }
      EXPECT_EQ(at, count);
      EXPECT_EQ(slice_of(count, 4, size + 1, size).begin, count);
      EXPECT_EQ(slice_of(count, 4, size + 1, size).count(), 0u);
    }
  }
}

// Whatever groups its parent had.
TEST(Group, AForkedChildLeavesItsGroupsWhenItExits) {
  if (test::kSanitized) GTEST_SKIP() << "what exit() leaves on the stack counts as a leak";
  run_thread_ranks(1, [](auto parents) {
    Group(parents).barrier();
    const auto ends =
        test::run_process_ranks(2, [](int rank, BootstrapSockets sockets) -> std::string {
          // Not destroyed by exit().
          static auto* const region =
              new auto(Region::create(std::move(sockets), rank, 2, small_region()));
          Group group(*region);
          group.barrier();
          if (rank == 1) std::exit(0);
          try {
            group.barrier();
            return "no error";
          } catch (const PeerLost& error) {
            return error.what();
          }
        });
    EXPECT_THAT(ends[0].report, HasSubstr("rank 1 has left the group"));
    EXPECT_TRUE(ends[1].exited_cleanly());
  });
}

TEST(MonitoredBarrier, EarlyRankLearnsTheMissingRanks) {
  std::barrier over(3);
  run_thread_ranks(3, [&](auto region) {
    const int rank = region->rank();
    if (rank == 0) {
      for (std::uint32_t heard = region->rings();
           !Region::reached(region->memory().collectives(1).barrier.arrived, 1);
           heard = region->rings()) {
        region->listen(heard);
      }
    }
    if (rank != 2) {
      try {
        MonitoredBarrier(region).pass(std::chrono::milliseconds(rank == 0 ? 100 : 60'000), false);
        ADD_FAILURE() << "rank " << rank;
      } catch (const Timeout& error) {
        EXPECT_THAT(error.ranks(), ElementsAre(2)) << error.what();
      }
    }
    over.arrive_and_wait();
  });
}

// What every rank of `size` throws if those of `in_barrier` call the monitored barrier and the
// others all_reduce; and who is at fault.
std::string mismatch_with_barrier(int size, std::uint64_t in_barrier, std::vector<int>& culprits) {
  std::vector<std::string> texts(static_cast<std::size_t>(size));
  run_thread_ranks(size, [&](auto region) {
    Group group(region);
    MonitoredBarrier barrier(region);
    barrier.pass(std::chrono::minutes(1), false);
    float x = 1;
    group.all_reduce(&x, &x, 1, DataType::float32, ReduceOp::sum);
    auto& text = texts[static_cast<std::size_t>(region->rank())];
    try {
      if ((in_barrier & local_rank_bit(region->rank())) != 0) {
        barrier.pass(std::chrono::minutes(1), false);
      } else {
        group.all_reduce(&x, &x, 1, DataType::float32, ReduceOp::sum);
      }
      text = "no error";
    } catch (const Mismatch& error) {
      text = error.what();
      if (region->rank() == 0) culprits = error.ranks();
    }
    EXPECT_THROW(group.barrier(), Mismatch) << "a failed group must refuse further calls";
  });
  for (const auto& text : texts) EXPECT_EQ(text, texts[0]);
  return texts[0];
}

TEST(MonitoredBarrier, AnotherCallIsAMismatchOnEveryRank) {
  std::vector<int> culprits;
  EXPECT_EQ(
      mismatch_with_barrier(2, 0b01, culprits),
      "rank 0 called monitored_barrier, rank 1 all_reduce of 1 float32; call 2 of group test");
  EXPECT_THAT(culprits, ElementsAre(0, 1));
  EXPECT_EQ(
      mismatch_with_barrier(2, 0b10, culprits),
      "rank 0 called all_reduce of 1 float32, rank 1 monitored_barrier; call 2 of group test");
  EXPECT_EQ(mismatch_with_barrier(4, 0b0100, culprits),
            "ranks 0, 1 and 3 called all_reduce of 1 float32, rank 2 monitored_barrier; call 2 of "
            "group test");
  EXPECT_THAT(culprits, ElementsAre(2));
  EXPECT_EQ(mismatch_with_barrier(4, 0b1011, culprits),
            "ranks 0, 1 and 3 called monitored_barrier, rank 2 all_reduce of 1 float32; call 2 of "
            "group test");
  EXPECT_THAT(culprits, ElementsAre(2));
}

TEST(MonitoredBarrier, EveryMixWithOtherCallsHasOneText) {
  for (int mix = 0; mix < 27; ++mix) {
    const std::array<int, 3> calls{mix % 3, mix / 3 % 3, mix / 9};
    const bool agree = calls[0] == calls[1] && calls[1] == calls[2];
    std::array<std::string, 3> texts;
    run_thread_ranks(3, [&](auto region) {
      Group group(region);
      const auto me = static_cast<std::size_t>(region->rank());
      float x = 1;
      try {
        switch (calls[me]) {
          case 0:
            group.barrier();
            break;
          case 1:
            group.all_reduce(&x, &x, 1, DataType::float32, ReduceOp::sum);
            break;
          default:
            MonitoredBarrier(region).pass(std::chrono::minutes(1), false);
        }
        texts[me] = "no error";
      } catch (const Mismatch& error) {
        texts[me] = error.what();
      }
    });
    EXPECT_EQ(texts[0] == "no error", agree) << mix;
    EXPECT_EQ(texts[1], texts[0]) << mix;
    EXPECT_EQ(texts[2], texts[0]) << mix;
  }
}

TEST(MonitoredBarrier, AMismatchDoesNotWaitForAnAbsentRank) {
  run_thread_ranks(3, [](auto region) {
    Group group(region);
    try {
      if (region->rank() == 0) MonitoredBarrier(region).pass(std::chrono::minutes(1), false);
      if (region->rank() == 1) group.barrier();
      while (!region->failed()) std::this_thread::yield();
      group.barrier();
      ADD_FAILURE() << "no error";
    } catch (const Mismatch& error) {
      EXPECT_STREQ(error.what(),
                   "rank 0 called monitored_barrier, rank 1 barrier, rank 2 nothing yet; call 1 of "
                   "group test");
      EXPECT_THAT(error.ranks(), ElementsAre(0, 1));
    }
  });
}

TEST(MonitoredBarrier, RankThatTimedOutMayContinue) {
  run_thread_ranks(3, [](auto region) {
    Group group(region);
    MonitoredBarrier barrier(region);
    const auto go_on = [&] {
      group.barrier();
      barrier.pass(std::chrono::minutes(1), false);
    };
    if (region->rank() == 2) {  // times out before rank 0, which waits for rank 1
      EXPECT_THROW(barrier.pass(std::chrono::milliseconds(0), false), Timeout);
      return go_on();
    }
    if (region->rank() == 1) {
      const auto waits = [&] { return Region::reached(region->memory().slot(2, 1).round, 1); };
      while (!waits()) std::this_thread::yield();
    }
    EXPECT_NO_THROW(barrier.pass(std::chrono::minutes(1), false));
    go_on();
  });
}

TEST(MonitoredBarrier, AcceptsTheLongestTimeout) {
  std::binary_semaphore back(0);
  run_thread_ranks(2, [&](auto region) {
    MonitoredBarrier barrier(region);
    // A sum that wrapped would be over by then.
    if (region->rank() == 0) {
      EXPECT_FALSE(back.try_acquire_for(2 * kVerdict));
    }
    EXPECT_NO_THROW(barrier.pass(std::chrono::milliseconds::max(), false));
    if (region->rank() == 1) back.release();
  });
}

// As another thread of the rank sees it.
TEST(RanksBehind, AreThoseForWhichACallWaits) {
  std::latch seen(1);
  run_thread_ranks(3, [&](std::shared_ptr<Region> region) {
    Group group(region);
    group.barrier();
    EXPECT_TRUE(ranks_behind(*region).empty());
    std::thread observer;
    if (group.rank() == 0) {
      observer = std::thread([&] {
        EXPECT_TRUE(test::eventually([&] { return ranks_behind(*region) == RankSet{2}; }));
        seen.count_down();
      });
    }
    if (group.rank() == 2) seen.wait();
    group.barrier();
    if (observer.joinable()) observer.join();
  });
}

}  // namespace
}  // namespace paceline::shm
