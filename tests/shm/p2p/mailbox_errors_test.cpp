#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <barrier>
#include <cstring>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include <paceline/error.h>

#include "shm/p2p/mailbox.h"
#include "shm/p2p/requests.h"
#include "support/eventually.h"
#include "support/process_ranks.h"
#include "support/thread_ranks.h"

namespace paceline::shm {
namespace {

using test::numbers;
using test::Requests;
using test::run_thread_ranks;
using test::small_region;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(Mailbox, MismatchIsReportedOnBothSides) {
  run_thread_ranks(2, [](auto region) {
    Mailbox mailbox(region);
    Requests requests(mailbox);
    std::vector<int> data(region->rank() == 0 ? 9'000 : 9'001);
    region->rank() == 0 ? requests.send(data, 1, 4) : requests.receive(data, 0, 4);
    EXPECT_THAT([&] { requests.wait(); },
                ThrowsMessage<Mismatch>("rank 0 sent 9000 int32 to rank 1 with tag 4, which "
                                        "received 9001 int32"));
    EXPECT_THROW(requests.send(data, 1 - region->rank()), Mismatch) << "the group has failed";
  });
}

TEST(Mailbox, TimeoutNamesTheMissingMessage) {
  run_thread_ranks(3, [](auto region) {
    Mailbox mailbox(region);
    Requests requests(mailbox);
    std::vector<int> data(3);
    EXPECT_THAT(
        [&] {
          if (region->rank() == 0) {
            requests.receive(data, 2, 1, std::chrono::milliseconds(100));
          } else {
            // Those that wait for something else hear of it too.
            requests.receive(data, Mailbox::kAnyRank, 0);
          }
          requests.wait();
        },
        ThrowsMessage<Timeout>(
            "rank 2 did not send to rank 0 within the timeout of 0.1 s: recv of 3 int32 from rank "
            "2 with tag 1 in group test"));
  });
}

// Receives from `peer` as a thread that waits for that alone.
void receive_from(Mailbox& mailbox, int peer, std::chrono::milliseconds timeout) {
  std::vector<int> data(3);
  const Mailbox::Message message{.data = data.data(),
                                 .count = data.size(),
                                 .type = DataType::int32,
                                 .peer = peer,
                                 .tag = 0,
                                 .timeout = timeout};
  bool done = false;
  std::exception_ptr error;
  mailbox.receive(message, [&](std::exception_ptr problem, int /*peer*/) {
    error = std::move(problem);
    done = true;
  });
  mailbox.pump_for(message, false, [&] { return done; });
  if (error) std::rethrow_exception(error);
}

// Rank 3 sends nothing, and the others wait for each other in a row.
TEST(Mailbox, TimeoutNamesTheRankThatAllWaitFor) {
  run_thread_ranks(4, [](auto region) {
    const int rank = region->rank();
    if (rank == 3) {
      EXPECT_TRUE(test::eventually([&] { return region->failed(); }));
      return;
    }
    Mailbox mailbox(region);
    const auto others_wait = [&] {
      return region->awaited_by(1) == 2 && region->awaited_by(2) == 3;
    };
    if (rank == 0) {
      EXPECT_TRUE(test::eventually(others_wait));
    }
    try {
      receive_from(mailbox, rank + 1, std::chrono::milliseconds(rank == 0 ? 50 : 600'000));
      FAIL();
    } catch (const Timeout& error) {
      EXPECT_THAT(error.ranks(), ElementsAre(3));
      EXPECT_STREQ(
          error.what(),
          "rank 1 did not send to rank 0 within the timeout of 0.05 s: recv of 3 int32 "
          "from rank 1 with tag 0 in group test; rank 1 waits for rank 2; rank 2 waits for rank 3");
    }
    EXPECT_FALSE(region->awaited_by(rank)) << "it does not wait any more";
  });
}

TEST(Mailbox, TimeoutOfRanksThatWaitForEachOtherSaysSo) {
  run_thread_ranks(2, [](auto region) {
    Mailbox mailbox(region);
    const int peer = 1 - region->rank();
    EXPECT_THAT([&] { receive_from(mailbox, peer, std::chrono::seconds(1)); },
                ThrowsMessage<Timeout>(AllOf(HasSubstr(" waits for rank "),
                                             HasSubstr("; they wait for each other: send and"))));
  });
}

// Rank 0 waits for nothing but its deadline.
TEST(Mailbox, TimeoutNeverBlamesTheRankItself) {
  run_thread_ranks(2, [](auto region) {
    Mailbox mailbox(region);
    if (region->rank() == 1) {
      EXPECT_THROW(receive_from(mailbox, 0, std::chrono::minutes(1)), Timeout);
      return;
    }
    EXPECT_TRUE(test::eventually([&] { return region->awaited_by(1) == 0; }));
    Requests requests(mailbox);
    std::vector<int> data(3);
    requests.receive(data, 1, 0, std::chrono::milliseconds(50));
    try {
      requests.wait();
      FAIL();
    } catch (const Timeout& error) {
      EXPECT_THAT(error.ranks(), ElementsAre(1));
      EXPECT_THAT(error.what(), HasSubstr("; rank 1 waits for rank 0"));
    }
  });
}

TEST(Mailbox, ReceivesWhatARankSentBeforeItLeftAndThenThrows) {
  run_thread_ranks(2, [](auto region) {
    {
      Mailbox mailbox(region);
      Requests requests(mailbox);
      std::vector<int> data(5);
      if (region->rank() == 0) {
        data = numbers(5, 0, 0);
        requests.send(data, 1);
        requests.wait();
      } else {
        while (!region->peers().has_left(0)) std::this_thread::yield();
        requests.receive(data, 0);
        requests.wait();
        EXPECT_EQ(data, numbers(5, 0, 0));
        requests.receive(data, 0);
        EXPECT_THAT([&] { requests.wait(); },
                    ThrowsMessage<PeerLost>("rank 0 has left the group and is missing in recv of 5 "
                                            "int32 from rank 0 with tag 0 in group test"));
      }
    }
    region.reset();
  });
}

TEST(Mailbox, DeathOfARankFailsWaitsForOtherRanks) {
  const auto ends =
      test::run_process_ranks(3, [](int rank, BootstrapSockets sockets) -> std::string {
        const auto region = Region::create(std::move(sockets), rank, 3, small_region());
        Mailbox mailbox(region);
        Requests requests(mailbox);
        std::vector<int> data(3);
        if (rank == 2) std::_Exit(7);
        requests.receive(data, 1 - rank);
        try {
          requests.wait();
        } catch (const PeerLost& error) {
          EXPECT_THAT(error.ranks(), ElementsAre(2));
          return error.what();
        }
        return "no error";
      });
  for (const int rank : {0, 1}) {
    EXPECT_THAT(ends[static_cast<std::size_t>(rank)].report, HasSubstr("rank 2 was lost"));
  }
}

// A receiver that does not wait before its deadline has passed.
TEST(Mailbox, ReceivesAfterTheDeadlineWhatArrivedBefore) {
  constexpr std::chrono::milliseconds kTimeout{100};
  std::barrier sent(2);
  run_thread_ranks(2, [&](auto region) {
    Mailbox mailbox(region);
    Requests requests(mailbox);
    std::vector<int> data(3, region->rank());
    if (region->rank() == 0) {
      requests.receive(data, 1, 0, kTimeout);
      const auto deadline = base::Deadline::after(kTimeout);
      sent.arrive_and_wait();
      // The input of this test. Were the sleep too short, nothing would fail.
      std::this_thread::sleep_for(deadline.remaining());
    } else {
      requests.send(data, 0);
      mailbox.move();
      sent.arrive_and_wait();
    }
    EXPECT_NO_THROW(requests.wait());
    EXPECT_EQ(data, std::vector<int>(3, 1));
    sent.arrive_and_wait();
  });
}

TEST(Mailbox, AbortFromAnotherThreadEndsTheWait) {
  run_thread_ranks(2, [](auto region) {
    Mailbox mailbox(region);
    Requests requests(mailbox);
    std::vector<int> data(3);
    std::thread aborting;
    EXPECT_THAT(
        [&] {
          requests.receive(data, 1 - region->rank());
          if (region->rank() == 1) aborting = std::thread([&] { region->abort("enough"); });
          requests.wait();
        },
        ThrowsMessage<PeerLost>("rank 1 left the group with an exception: enough"));
    if (aborting.joinable()) aborting.join();
  });
}

TEST(Mailbox, RejectsInvalidArguments) {
  run_thread_ranks(2, [](auto region) {
    Mailbox mailbox(region);
    Requests requests(mailbox);
    std::vector<int> data(3);
    EXPECT_THROW(requests.send(data, 2), UsageError);
    EXPECT_THROW(requests.send(data, region->rank()), UsageError);
    EXPECT_THROW(requests.send(data, Mailbox::kAnyRank), UsageError);
    EXPECT_THROW(requests.receive(data, 2), UsageError);
    EXPECT_THROW(requests.receive(data, 1 - region->rank(), -1), UsageError);
  });
}

// A message that completes in the round in which another fails is reported as completed.
TEST(Mailbox, FailureOfOneMessageKeepsAnother) {
  run_thread_ranks(2, [](auto region) {
    Mailbox mailbox(region);
    Requests good(mailbox);
    Requests bad(mailbox);
    std::vector<int> data = numbers(4, 0, 0);
    if (region->rank() == 0) {
      good.send(data, 1, 0);
      good.send(data, 1, 1);
      mailbox.move();
      while (!region->failed()) std::this_thread::yield();
      return;
    }
    while (region->memory().send_ring(0, 1).written.load() != 2) std::this_thread::yield();
    std::vector<int> received(4);
    std::vector<int> wrong(5);
    good.receive(received, 0, 0);
    bad.receive(wrong, 0, 1);
    EXPECT_THROW(bad.wait(), Mismatch);
    good.wait();
    EXPECT_EQ(received, data);
  });
}

TEST(Mailbox, MessageWithoutRoomFailsAlone) {
  auto options = small_region();
  options.arena_bytes = std::size_t{3} << 19;
  run_thread_ranks(
      2,
      [](auto region) {
        Mailbox mailbox(region);
        constexpr std::size_t kCount = 500'000;
        const auto sent = numbers(kCount, region->rank(), 0);
        std::vector<int> received(kCount);
        Requests first(mailbox);
        Requests second(mailbox);
        Requests third(mailbox);
        if (region->rank() == 0) {
          first.send(sent, 1, 0);
          second.send(sent, 1, 1);  // a buffer fits in the arena, two do not
          third.receive(received, 1, 2);
          EXPECT_THAT([&] { second.wait(); }, ThrowsMessage<Error>(HasSubstr("no room for")));
          void* const block =
              region->memory().allocate(10'000);  // not where the first has its buffer
          std::memset(block, 0x55, 10'000);
          first.wait();
          third.wait();
          EXPECT_EQ(received, numbers(kCount, 1, 0));
        } else {
          first.receive(received, 0, 0);
          first.wait();
          EXPECT_EQ(received, numbers(kCount, 0, 0));
          third.send(sent, 0, 2);
          third.wait();
        }
      },
      options);
}

TEST(Mailbox, OfARankThatHasLeftEndsNoOtherMessages) {
  std::barrier has_left(3);
  run_thread_ranks(3, [&](auto region) {
    Mailbox mailbox(region);
    std::vector<int> data(1);
    if (region->rank() == 0) {
      Requests open(mailbox);
      open.receive(data, 1, 9);
      region->depart();
      EXPECT_THROW(open.wait(), UsageError);
    }
    has_left.arrive_and_wait();
    if (region->rank() == 0) return;
    Requests requests(mailbox);
    region->rank() == 1 ? requests.send(data, 2) : requests.receive(data, 1);
    requests.wait();
    EXPECT_FALSE(region->failed()) << region->failure().text;
  });
}

TEST(Mailbox, DeadlinesHoldWhileOtherMessagesProgress) {
  run_thread_ranks(3, [](auto region) {
    Mailbox mailbox(region);
    std::vector<int> data(1);
    if (region->rank() == 1) {  // silent
      while (!region->failed()) std::this_thread::yield();
      return;
    }
    try {
      Requests silent(mailbox);
      if (region->rank() == 0) silent.receive(data, 1, 9, std::chrono::milliseconds(100));
      std::vector<int> others(1);
      const auto deadline = base::Deadline::after(test::kTestTimeout);
      while (!deadline.expired()) {
        Requests requests(mailbox);
        region->rank() == 0 ? requests.receive(others, 2) : requests.send(others, 0);
        requests.wait();
      }
      ADD_FAILURE() << "nobody was told";
    } catch (const Timeout& error) {
      EXPECT_THAT(error.ranks(), ElementsAre(1));
    }
  });
}

}  // namespace
}  // namespace paceline::shm
