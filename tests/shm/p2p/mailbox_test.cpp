#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include <paceline/error.h>

#include "shm/p2p/mailbox.h"
#include "support/cases.h"
#include "support/eventually.h"
#include "support/process_ranks.h"
#include "support/shared.h"
#include "support/thread_ranks.h"

namespace paceline::shm {
namespace {

using test::run_thread_ranks;
using test::small_region;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr std::chrono::minutes kLong{1};

// Requests of one rank that are made first and then waited for.
class Requests {
 public:
  explicit Requests(Mailbox& mailbox) : mailbox_(mailbox) {}
  void send(const std::vector<int>& data, int to, int tag = 0,
            std::chrono::milliseconds timeout = kLong) {
    ++open_;
    mailbox_.send({const_cast<int*>(data.data()), data.size(), DataType::int32, to, tag, timeout},
                  done());
  }
  void receive(std::vector<int>& data, int from, int tag = 0,
               std::chrono::milliseconds timeout = kLong) {
    ++open_;
    mailbox_.receive({data.data(), data.size(), DataType::int32, from, tag, timeout}, done());
  }
  // Throws the first error; else gives whom the last request that ended was with.
  int wait() {
    mailbox_.pump([&] { return open_ == 0; });
    if (error_) std::rethrow_exception(error_);
    return last_peer_;
  }

 private:
  Mailbox::Done done() {
    return [this](const std::exception_ptr& error, int peer) {
      if (error && !error_) error_ = error;
      last_peer_ = peer;
      --open_;
    };
  }
  Mailbox& mailbox_;
  std::atomic<int> open_{0};
  std::atomic<int> last_peer_{-1};
  std::exception_ptr error_;
};

std::vector<int> numbers(std::size_t count, int from, int tag) {
  std::vector<int> data(count);
  std::iota(data.begin(), data.end(), from * 1000 + tag);
  return data;
}

// Small ones go with their announcement, large ones through buffers, shared ones directly.
constexpr std::size_t kCounts[] = {0, 1, 2048, 2049, 65'536, 65'537, 300'000};

using MailboxRing = test::SizeTest;
INSTANTIATE_TEST_SUITE_P(All, MailboxRing, ::testing::Values(2, 3, 5), test::CaseName());

TEST_P(MailboxRing, PassesMessagesOfEverySize) {
  const int size = GetParam();
  run_thread_ranks(size, [size](auto region) {
    Mailbox mailbox(region);
    const int me = region->rank();
    const int next = (me + 1) % size;
    const int previous = (me + size - 1) % size;
    for (const std::size_t count : kCounts) {
      const auto sent = numbers(count, me, 7);
      std::vector<int> received(count);
      Requests requests(mailbox);
      requests.send(sent, next, 7);
      requests.receive(received, previous, 7);
      requests.wait();
      EXPECT_EQ(received, numbers(count, previous, 7));
    }
  });
}

TEST(Mailbox, ReadsSharedMemoryInPlace) {
  run_thread_ranks(2, [](auto region) {
    Mailbox mailbox(region);
    constexpr std::size_t kCount = 700'000;
    auto* const shared = static_cast<int*>(region->memory().allocate(kCount * sizeof(int)));
    bool done = false;
    const auto end = [&](const std::exception_ptr& error, int) {
      EXPECT_FALSE(error);
      done = true;
    };
    const Mailbox::Message message{shared, kCount, DataType::int32, 1 - region->rank(), 0, kLong};
    if (region->rank() == 0) {
      std::iota(shared, shared + kCount, 5);
      const std::size_t in_use = region->memory().bytes_in_use();
      mailbox.send(message, end);
      mailbox.pump([&] { return done || region->memory().bytes_in_use() > in_use; });
      EXPECT_LE(region->memory().bytes_in_use(), in_use + 256) << "a buffer was used";
    } else {
      mailbox.receive(message, end);
    }
    mailbox.pump([&] { return done; });
    EXPECT_EQ(shared[0], 5);
    EXPECT_EQ(shared[kCount - 1], static_cast<int>(kCount) + 4);
  });
}

TEST(Mailbox, TakesTagsInAnyOrderAndOneTagInOrder) {
  run_thread_ranks(2, [](auto region) {
    Mailbox mailbox(region);
    constexpr std::size_t kMany = 100;  // more than an send_ring holds
    for (const std::size_t count : {std::size_t{3}, std::size_t{5000}}) {
      Requests requests(mailbox);
      std::vector<std::vector<int>> data;
      for (std::size_t i = 0; i < 2 * kMany; ++i) {
        data.push_back(numbers(count, static_cast<int>(i), 0));
      }
      if (region->rank() == 0) {
        for (std::size_t i = 0; i < 2 * kMany; ++i) {
          requests.send(data[i], 1, static_cast<int>(i / 2));
        }
        requests.wait();
      } else {
        std::vector<std::vector<int>> received(2 * kMany, std::vector<int>(count));
        for (std::size_t i = kMany; i-- > 0;) {
          requests.receive(received[2 * i], 0, static_cast<int>(i));
          requests.receive(received[2 * i + 1], 0, static_cast<int>(i));
        }
        requests.wait();
        EXPECT_EQ(received, data);
      }
    }
  });
}

TEST(Mailbox, ReceiveFromAnyRankReturnsTheSender) {
  run_thread_ranks(4, [](auto region) {
    Mailbox mailbox(region);
    if (region->rank() != 0) {
      Requests requests(mailbox);
      const std::vector<int> mine{region->rank()};
      requests.send(mine, 0, 3);
      requests.wait();
      return;
    }
    std::vector<int> senders;
    for (int i = 0; i < 3; ++i) {
      Requests requests(mailbox);
      std::vector<int> got(1);
      requests.receive(got, Mailbox::kAnyRank, 3);
      senders.push_back(requests.wait());
      EXPECT_EQ(got[0], senders.back());
    }
    EXPECT_THAT(senders, ::testing::UnorderedElementsAre(1, 2, 3));
  });
}

// What a program does follows from its seed, on every rank.
void exchange_at_random(const std::shared_ptr<Region>& region, unsigned seed, int rounds) {
  Mailbox mailbox(region);
  std::mt19937 random(seed);
  const int size = region->size();
  for (int round = 0; round < rounds; ++round) {
    struct One {
      int from, to, tag;
      std::size_t count;
    };
    std::vector<One> all(1 + random() % 40);
    for (One& one : all) {
      one.from = static_cast<int>(random() % static_cast<unsigned>(size));
      one.to = (one.from + 1 + static_cast<int>(random() % static_cast<unsigned>(size - 1))) % size;
      one.tag = static_cast<int>(random() % 3);
      one.count = random() % 5 == 0 ? random() % 100'000 : random() % 50;
    }
    std::vector<std::vector<int>> data(all.size());
    Requests requests(mailbox);
    for (std::size_t i = 0; i < all.size(); ++i) {
      const auto& [from, to, tag, count] = all[i];
      const int id = static_cast<int>(i);
      if (from == region->rank()) requests.send(data[i] = numbers(count, id, tag), to, tag);
      if (to == region->rank()) requests.receive(data[i] = std::vector<int>(count), from, tag);
    }
    requests.wait();
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (all[i].to != region->rank()) continue;
      ASSERT_EQ(data[i], numbers(all[i].count, static_cast<int>(i), all[i].tag))
          << round << ' ' << i;
    }
  }
}

using MailboxThreads = test::SizeTest;
INSTANTIATE_TEST_SUITE_P(All, MailboxThreads, ::testing::Values(2, 3, 5, 8), test::CaseName());

TEST_P(MailboxThreads, DeliverRandomPrograms) {
  const int size = GetParam();
  run_thread_ranks(
      size, [&](auto region) { exchange_at_random(region, static_cast<unsigned>(size), 30); });
}

using MailboxProcesses = test::SizeTest;
INSTANTIATE_TEST_SUITE_P(All, MailboxProcesses, ::testing::Values(2, 4, 8), test::CaseName());

TEST_P(MailboxProcesses, DeliverRandomPrograms) {
  const int size = GetParam();
  test::expect_process_ranks(size, [size](int rank, BootstrapSockets sockets) {
    exchange_at_random(Region::create(std::move(sockets), rank, size, small_region()),
                       static_cast<unsigned>(size), 50);
  });
}

TEST(Mailbox, ServesSeveralThreadsOfARank) {
  run_thread_ranks(2, [](auto region) {
    Mailbox mailbox(region);
    std::vector<std::thread> threads;
    for (int tag = 0; tag < 4; ++tag) {
      threads.emplace_back([&, tag] {
        for (int round = 0; round < 50; ++round) {
          const std::size_t count = round % 5 == 0 ? 30'000 : 10;
          const auto sent = numbers(count, region->rank(), tag);
          std::vector<int> received(count);
          Requests requests(mailbox);
          requests.send(sent, 1 - region->rank(), tag);
          requests.receive(received, 1 - region->rank(), tag);
          requests.wait();
          ASSERT_EQ(received, numbers(count, 1 - region->rank(), tag));
        }
      });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_TRUE(mailbox.idle());
  });
}

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
            "rank 2 did not send within the timeout of 0.1 s: recv of 3 int32 from "
            "rank 2 with tag 1 in group test"));
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

// Of a receiver that had no time until its deadline was over.
TEST(Mailbox, ReceivesAfterTheDeadlineWhatArrivedBefore) {
  constexpr std::chrono::seconds kTimeout{5};
  struct Board {
    std::atomic<pid_t> receiver{0};
    std::atomic<bool> over{false};
  };
  const test::Shared<Board> board;
  const auto ends =
      test::run_process_ranks(2, [&](int rank, BootstrapSockets sockets) -> std::string {
        const auto region = Region::create(std::move(sockets), rank, 2, small_region());
        Mailbox mailbox(region);
        Requests requests(mailbox);
        std::vector<int> data(3, rank);
        if (rank == 0) {
          requests.receive(data, 1, 0, kTimeout);
          board->receiver = ::getpid();
          requests.wait();
          EXPECT_EQ(data, std::vector<int>(3, 1));
          board->over = true;
        } else {
          EXPECT_TRUE(test::eventually([&] { return board->receiver != 0; }));
          const auto deadline = base::Deadline::after(kTimeout + std::chrono::milliseconds(100));
          ::kill(board->receiver, SIGSTOP);
          requests.send(data, 0);
          mailbox.move();
          std::this_thread::sleep_for(deadline.remaining());
          ::kill(board->receiver, SIGCONT);
          requests.wait();
          EXPECT_TRUE(test::eventually([&] { return board->over.load(); }));
        }
        return "";
      });
  for (const auto& end : ends) EXPECT_TRUE(end.exited_cleanly()) << end.report;
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

// A message that comes in the same round as another's failure is told of its own luck.
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
      const auto deadline = base::Deadline::after(test::kPatience);
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

TEST(Mailbox, FreesPayloads) {
  run_thread_ranks(2, [](auto region) {
    Mailbox mailbox(region);
    std::size_t in_use = 0;
    for (int round = 0; round < 200; ++round) {
      Requests requests(mailbox);
      const std::size_t count = round % 2 == 0 ? 10 : 4000;
      const auto sent = numbers(count, 0, 0);
      std::vector<int> received(count);
      requests.send(sent, 1 - region->rank());
      requests.receive(received, 1 - region->rank());
      requests.wait();
      if (round == 20) in_use = region->memory().bytes_in_use();
    }
    EXPECT_LE(region->memory().bytes_in_use(), in_use + 40'000);
  });
}

}  // namespace
}  // namespace paceline::shm
