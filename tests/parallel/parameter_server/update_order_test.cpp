#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "parallel/parameter_server/update_order.h"
#include "support/eventually.h"
#include "support/thoroughness.h"

namespace paceline::parameter_server {
namespace {

using Steps = std::vector<std::vector<int>>;

// Longer than any wait here.
constexpr std::chrono::minutes kLimit{10};

// An order whose steps are only written down, under its lock.
struct Recorded {
  Recorded(int workers, std::optional<std::int64_t> staleness)
      : order(workers, staleness, [this](const std::vector<int>& step) { steps.push_back(step); }) {
    for (int worker = 0; worker < workers; ++worker) {
      order.meet(worker);
      order.enter(worker, order.join(worker));
    }
  }
  std::int64_t updates(int worker) const { return order.stats().workers.at(worker).updates; }

  Steps steps;
  UpdateOrder order;
};

TEST(UpdateOrder, ASynchronousStepTakesAllWorkersInOrder) {
  Recorded recorded(3, 0);
  {
    std::vector<std::jthread> threads;
    for (const int worker : {2, 0, 1}) {
      threads.emplace_back([&, worker] {
        for (std::int64_t version = 0; version < 20; ++version) {
          EXPECT_EQ(recorded.order.push(worker, version, kLimit), version + 1);
        }
      });
    }
  }
  EXPECT_EQ(recorded.steps, Steps(20, {0, 1, 2}));
  EXPECT_EQ(recorded.order.stats().staleness, (std::map<std::int64_t, std::int64_t>{{0, 60}}));
  EXPECT_EQ(recorded.order.stats().version, 20);
}

TEST(UpdateOrder, ASynchronousStepGoesOnWithoutALostWorker) {
  Recorded recorded(3, 0);
  std::jthread first([&] { recorded.order.push(0, 0, kLimit); });
  std::jthread second([&] { recorded.order.push(1, 0, kLimit); });
  recorded.order.lose(2, "killed");
  first.join();
  second.join();
  EXPECT_EQ(recorded.steps, (Steps{{0, 1}}));
  EXPECT_EQ(recorded.order.lost().front(), (std::pair<int, std::string>{2, "killed"}));
}

TEST(UpdateOrder, WorkersThatHaveNotComeYetAreWaitedFor) {
  Steps steps;
  UpdateOrder order(2, 0, [&](const std::vector<int>& step) { steps.push_back(step); });
  order.enter(0, order.join(0));
  std::jthread first([&] { order.push(0, 0, kLimit); });
  EXPECT_EQ(order.presence(1), Presence::awaited);
  order.enter(1, order.join(1));
  order.push(1, 0, kLimit);
  first.join();
  EXPECT_EQ(steps, (Steps{{0, 1}}));
}

TEST(UpdateOrder, ANewProcessTakesPartFromTheStepThatItEntersWith) {
  Recorded recorded(2, 0);
  recorded.order.lose(1, "killed");
  recorded.order.push(0, 0, kLimit);
  recorded.order.meet(1);
  recorded.order.push(0, 1, kLimit);  // nobody waits for one that has not joined
  ASSERT_EQ(recorded.order.join(1), 2);
  std::jthread first([&] { recorded.order.push(0, 2, kLimit); });
  // Another server is one step further.
  recorded.order.enter(1, 3);
  std::int64_t pulled = recorded.order.pull(1, kLimit, [] {});
  EXPECT_EQ(pulled, 3);
  first.join();
  std::jthread second([&] { recorded.order.push(0, 3, kLimit); });
  recorded.order.push(1, pulled, kLimit);
  second.join();
  EXPECT_EQ(recorded.steps, (Steps{{0}, {0}, {0}, {0, 1}}));
}

TEST(UpdateOrder, AJoiningWorkerHoldsTheNextStepBack) {
  Recorded recorded(2, 0);
  recorded.order.lose(1, "killed");
  recorded.order.meet(1);
  recorded.order.join(1);
  std::jthread first([&] { recorded.order.push(0, 0, kLimit); });
  recorded.order.enter(1, 0);
  recorded.order.push(1, 0, kLimit);
  first.join();
  EXPECT_EQ(recorded.steps, (Steps{{0, 1}}));
}

TEST(UpdateOrder, NoWorkerGetsFurtherAheadThanTheStaleness) {
  constexpr std::int64_t kStaleness = 3;
  Recorded recorded(2, kStaleness);
  std::jthread fast([&] {
    for (int i = 0; i < 10; ++i) recorded.order.push(0, 0, kLimit);
  });
  for (std::int64_t i = 0; i < 10; ++i) {
    // The slow worker steps only once the fast one has come as far as it may.
    ASSERT_TRUE(test::eventually(
        [&] { return recorded.updates(0) == std::min<std::int64_t>(i + kStaleness, 10); }));
    recorded.order.push(1, 0, kLimit);
  }
  fast.join();
  EXPECT_EQ(recorded.order.stats().largest_lead, kStaleness);
  EXPECT_EQ(recorded.order.stats().version, 20);
}

TEST(UpdateOrder, ALostWorkerNoLongerBoundsTheOthers) {
  Recorded recorded(2, 1);
  recorded.order.push(0, 0, kLimit);
  std::jthread fast([&] { recorded.order.push(0, 1, kLimit); });
  recorded.order.lose(1, "killed");
  fast.join();
  EXPECT_EQ(recorded.updates(0), 2);
}

// Whom a push waits for in vain.
std::vector<int> late_workers(UpdateOrder& order, int worker) {
  try {
    order.push(worker, 0, std::chrono::milliseconds(20));
  } catch (const LateWorkers& late) {
    return late.workers;
  }
  return {};
}

TEST(UpdateOrder, AWaitEndsAtItsLimitAndNamesTheSlowest) {
  Recorded recorded(4, 0);
  EXPECT_EQ(late_workers(recorded.order, 0), (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(late_workers(recorded.order, 3), (std::vector<int>{1, 2})) << "nobody waits for 0";
  EXPECT_EQ(recorded.order.presence(0), Presence::lost);
  // Their gradients do not count.
  std::jthread other([&] { recorded.order.push(2, 0, kLimit); });
  recorded.order.push(1, 0, kLimit);
  other.join();
  EXPECT_EQ(recorded.steps, (Steps{{1, 2}}));
}

TEST(UpdateOrder, ANewProcessOfALateWorkerTakesPart) {
  Recorded recorded(2, 0);
  EXPECT_EQ(late_workers(recorded.order, 0), std::vector<int>{1});
  recorded.order.meet(0);
  recorded.order.enter(0, recorded.order.join(0));
  std::jthread other([&] { recorded.order.push(1, 0, kLimit); });
  recorded.order.push(0, 0, kLimit);
  other.join();
  EXPECT_EQ(recorded.steps, (Steps{{0, 1}}));
}

TEST(UpdateOrder, UnderABoundAWaitNamesTheSlowest) {
  Recorded recorded(2, 1);
  recorded.order.push(1, 0, kLimit);
  EXPECT_EQ(late_workers(recorded.order, 1), std::vector<int>{0});
  EXPECT_EQ(recorded.steps, (Steps{{1}}));
}

// A worker that has come, and hangs before it joins.
TEST(UpdateOrder, AWaitNamesAWorkerThatDoesNotJoin) {
  UpdateOrder order(2, 0, [](const std::vector<int>& /*step*/) {});
  order.meet(0);
  order.meet(1);
  order.enter(0, order.join(0));
  EXPECT_EQ(late_workers(order, 0), std::vector<int>{1});
}

TEST(UpdateOrder, AWaitGoesOnOnceAWorkerThatDoesNotComeIsLost) {
  UpdateOrder order(2, 0, [](const std::vector<int>& /*step*/) {});
  order.enter(0, order.join(0));
  std::jthread first([&] { EXPECT_EQ(order.push(0, 0, std::chrono::milliseconds(1)), 1); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // the input of this test
  order.lose(1, "it did not come");
}

// Of two servers, the other one made the fifth step, whose gradient was lost here.
TEST(UpdateOrder, AWorkerThatEntersBehindTheLastStepOfAllPulls) {
  Recorded recorded(1, 0);
  recorded.order.lose(0, "killed");
  recorded.order.meet(0);
  EXPECT_EQ(recorded.order.join(0), 0);
  recorded.order.enter(0, 5);
  EXPECT_EQ(recorded.order.pull(0, kLimit, [] {}), 5);
  EXPECT_EQ(recorded.order.push(0, 5, kLimit), 6);
}

TEST(UpdateOrder, AnAsynchronousStepWaitsForNobody) {
  Recorded recorded(2, std::nullopt);
  for (int i = 0; i < 5; ++i) recorded.order.push(0, 0, kLimit);
  recorded.order.push(1, 2, kLimit);
  const auto stats = recorded.order.stats();
  EXPECT_EQ(stats.staleness,
            (std::map<std::int64_t, std::int64_t>{{0, 1}, {1, 1}, {2, 1}, {3, 2}, {4, 1}}));
  EXPECT_EQ(stats.largest_lead, 5);
}

TEST(UpdateOrder, WhatApplyThrowsReachesEveryWorker) {
  UpdateOrder order(2, 0,
                    [](const std::vector<int>& /*step*/) { throw std::runtime_error("no step"); });
  for (int worker = 0; worker < 2; ++worker) order.enter(worker, order.join(worker));
  std::atomic<int> thrown = 0;
  const auto push = [&](int worker) {
    try {
      order.push(worker, 0, kLimit);
    } catch (const std::runtime_error& error) {
      thrown += error.what() == std::string("no step") ? 1 : 0;
    }
  };
  std::jthread other([&] { push(1); });
  push(0);
  other.join();
  EXPECT_EQ(thrown, 2);
  EXPECT_THROW(order.check_failure(), std::runtime_error);
}

TEST(UpdateOrder, IsOverOnceAllHaveLeftOrAreLost) {
  Recorded recorded(2, 0);
  recorded.order.leave(0);
  EXPECT_FALSE(recorded.order.is_over());
  recorded.order.lose(1, "killed");
  EXPECT_TRUE(recorded.order.is_over());
  recorded.order.meet(1);
  EXPECT_FALSE(recorded.order.is_over());
}

// Workers that end and come back at random moments: every push is applied once, and bounds hold.
void run_at_random(unsigned seed, std::optional<std::int64_t> staleness) {
  constexpr int kWorkers = 4;
  Recorded recorded(kWorkers, staleness);
  std::vector<std::int64_t> pushes(kWorkers);
  {
    std::vector<std::jthread> threads;
    for (int worker = 0; worker < kWorkers; ++worker) {
      threads.emplace_back([&, worker] {
        std::mt19937 random(seed * kWorkers + static_cast<unsigned>(worker));
        auto& order = recorded.order;
        for (int i = 0; i < 60; ++i) {
          const auto version = order.pull(worker, kLimit, [] {});
          order.push(worker, version, kLimit);
          ++pushes[static_cast<std::size_t>(worker)];
          if (random() % 10 != 0) continue;
          order.lose(worker, "killed");
          order.meet(worker);
          order.enter(worker, order.join(worker));
        }
        order.leave(worker);
      });
    }
  }
  std::vector<std::int64_t> applied(kWorkers);
  for (const auto& step : recorded.steps) {
    for (const int worker : step) ++applied[static_cast<std::size_t>(worker)];
    EXPECT_TRUE(std::ranges::is_sorted(step));
  }
  EXPECT_EQ(applied, pushes);
  const auto stats = recorded.order.stats();
  EXPECT_EQ(stats.version, static_cast<std::int64_t>(recorded.steps.size()));
  if (staleness) {
    EXPECT_LE(stats.largest_lead, std::max<std::int64_t>(*staleness, 1));
  }
  if (staleness == 0) {
    EXPECT_EQ(stats.staleness.size(), 1U);
  }
}

TEST(UpdateOrder, RandomLossesLoseAndDoubleNothing) {
  for (unsigned seed = 0; seed < 20U * static_cast<unsigned>(test::thoroughness()); ++seed) {
    for (const std::optional<std::int64_t> staleness :
         {std::optional<std::int64_t>(), std::optional<std::int64_t>(0),
          std::optional<std::int64_t>(1), std::optional<std::int64_t>(4)}) {
      SCOPED_TRACE(fmt::format("seed {}, staleness {}", seed, staleness.value_or(-1)));
      run_at_random(seed, staleness);
    }
  }
}

}  // namespace
}  // namespace paceline::parameter_server
