#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "shm/p2p/mailbox.h"
#include "shm/p2p/requests.h"
#include "support/cases.h"
#include "support/process_ranks.h"
#include "support/thread_ranks.h"

namespace paceline::shm {
namespace {

using test::kLong;
using test::numbers;
using test::Requests;
using test::run_thread_ranks;
using test::small_region;

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
