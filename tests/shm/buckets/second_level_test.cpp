#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <latch>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <paceline/error.h>

#include "shm/sync/doorbell.h"
#include "support/second_level_steps.h"
#include "support/skipped_bucket.h"

namespace paceline::shm {
namespace {

using test::FakeNetwork;
using test::run_nodes;
using test::nodes::expect_reduced;
using test::nodes::fill;
using test::nodes::for_all_jobs;
using test::nodes::kCount;
using test::nodes::ranks_of;
using test::nodes::Results;
using test::nodes::run_step;
using test::nodes::value_of;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(SecondLevel, AveragesOverAllNodesWhateverTheOrder) {
  for_all_jobs([](FakeNetwork& network) {
    Results results(ranks_of(network));
    run_nodes(network, [&](auto region, int node, int index) {
      Group group(region);
      BucketReducer reducer(group, test::nodes::kBuckets, test::nodes::bucket_name,
                            {.between_nodes = network.level(node)});
      for (std::size_t step = 1; step <= 8; ++step) {
        run_step(reducer, network, index, step);
        EXPECT_DOUBLE_EQ(reducer.share(), 1.0 / static_cast<double>(ranks_of(network)));
        for (std::size_t b = 0; b < kCount; ++b) results.add(index, reducer, b);
      }
    });
    results.expect_the_same_everywhere();
  });
}

// In every third step the first node counts nothing, and has no numbers.
TEST(SecondLevel, WeighsRanksOfAllNodes) {
  for (const std::vector<int>& sizes : {std::vector{2, 2}, {1, 3}, {3, 2, 1}}) {
    FakeNetwork network(sizes, 1);
    Results results(ranks_of(network));
    run_nodes(network, [&](auto region, int node, int index) {
      Group group(region);
      BucketReducer reducer(group, test::nodes::kBuckets, test::nodes::bucket_name,
                            {.between_nodes = network.level(node)});
      for (std::size_t step = 1; step <= 6; ++step) {
        std::vector<double> weights;
        for (std::size_t i = 0; i < ranks_of(network); ++i) {
          const bool first_node = i < network.nodes()[0].size();
          weights.push_back(step % 3 == 0 && first_node ? 0 : 8.0 + static_cast<double>(i));
        }
        const double weight = weights[static_cast<std::size_t>(index)];
        reducer.begin_step({.forwards = static_cast<std::uint32_t>(step)}, {&weight, 1});
        for (std::size_t b = 0; b < kCount; ++b) {
          fill(reducer, b, index, step);
          if (weight == 0 && test::nodes::kBuckets[b].op == ReduceOp::avg) {
            const std::size_t bytes =
                test::nodes::kBuckets[b].count * element_size(test::nodes::kBuckets[b].type);
            std::memset(reducer.data(b).get(), 0xff, bytes);  // NaN
          }
          reducer.publish(b);
        }
        reducer.finish();
        EXPECT_DOUBLE_EQ(reducer.share(),
                         weight / std::accumulate(weights.begin(), weights.end(), 0.0));
        for (std::size_t b = 0; b < kCount; ++b) {
          expect_reduced(reducer, b, step, weights);
          results.add(index, reducer, b);
        }
      }
    });
    results.expect_the_same_everywhere();
  }
}

TEST(SecondLevel, LeavesBucketsThatAllSkip) {
  FakeNetwork network({2, 1}, 1);
  run_nodes(network, [&](auto region, int node, int index) {
    Group group(region);
    BucketReducer reducer(group, test::nodes::kBuckets, test::nodes::bucket_name,
                          {.between_nodes = network.level(node)});
    const std::vector<double> weights(3, 1.0);
    for (std::size_t step = 1; step <= 6; ++step) {
      reducer.begin_step({.forwards = static_cast<std::uint32_t>(step)});
      const std::size_t skipped = step % kCount;
      for (std::size_t b = 0; b < kCount; ++b) {
        fill(reducer, b, index, step);
        b == skipped ? reducer.skip(b) : reducer.publish(b);
      }
      reducer.finish();
      for (std::size_t b = 0; b < kCount; ++b) {
        if (b != skipped) expect_reduced(reducer, b, step, weights);
      }
      const double first =
          test::get(test::nodes::kBuckets[skipped].type, reducer.data(skipped).get(), 0).real();
      EXPECT_EQ(first, value_of(index, step, skipped, 0));
    }
  });
}

// Rank 1 does not wait for the bucket that it skips, and comes to the next step first.
TEST(SecondLevel, SkippingABucketThatASlowerRankUsesIsAMismatch) {
  for (const bool skips_again : {true, false}) {
    FakeNetwork network({2, 1}, 1);
    std::atomic<bool> ahead = false;
    run_nodes(network, [&](auto region, int node, int index) {
      Group group(region);
      BucketReducer reducer(group, test::nodes::kBuckets, test::nodes::bucket_name,
                            {.between_nodes = network.level(node)});
      const auto steps = [&] {
        test::skip_a_bucket_that_others_use(reducer, index, kCount, skips_again, ahead);
      };
      // Of global ranks, which begin at 100 here. Node 1 learns less.
      const std::string text = node == 0 ? "rank 101 skipped bucket 0" : "rank 101";
      EXPECT_THAT(steps, ThrowsMessage<Mismatch>(HasSubstr(text)));
    });
  }
}

TEST(SecondLevel, ModificationsThatDifferBetweenNodesShow) {
  FakeNetwork network({2, 1}, 1);
  run_nodes(network, [&](auto region, int node, int /*index*/) {
    Group group(region);
    BucketReducer reducer(group, test::nodes::kBuckets, test::nodes::bucket_name,
                          {.between_nodes = network.level(node)});
    for (std::uint32_t step = 1; step <= 4; ++step) {
      const bool differs = step % 2 == 0;
      reducer.begin_step({.forwards = step, .modifications = differs && node == 1 ? 1U : 0U});
      for (std::size_t b = 0; b < kCount; ++b) reducer.publish(b);
      reducer.finish();
      EXPECT_EQ(reducer.modifications_differ(), differs);
    }
  });
}

// Returns once a rank of this node waits in finish: then it looks after its peers.
void await_finish(const BucketReducer& reducer, int rank) {
  while (reducer.blocks().checks(rank) == 0) std::this_thread::yield();
}

// Rank 1 of the first node waits for what its rank 0 gets from the other node.
TEST(SecondLevel, WaitsForOtherNodesAreChargedToNoRank) {
  for (const bool gathers : {true, false}) {
    FakeNetwork network({2, 1}, 1);
    gathers ? network.hold_gatherings(true) : network.hold(true);
    std::latch ready(2);
    run_nodes(network, [&](auto region, int node, int index) {
      Group group(region);
      BucketReducer reducer(group, std::span(test::nodes::kBuckets).first(1),
                            test::nodes::bucket_name, {.between_nodes = network.level(node)});
      reducer.begin_step({.forwards = 1});
      fill(reducer, 0, index, 1);
      reducer.publish(0);
      if (node == 1) return reducer.finish();
      ready.arrive_and_wait();
      while (!gathers && network.started() == 0) std::this_thread::yield();
      if (index == 0) {
        await_finish(reducer, 1);
        gathers ? network.hold_gatherings(false) : network.hold(false);
        return reducer.finish();
      }
      reducer.finish();
      ASSERT_FALSE(reducer.waits().empty());
      EXPECT_EQ(reducer.waits().front().rank, -1);  // of the others, some are for rank 0
    });
  }
}

// Runs `body(network, reducer)` in a child that node 0 forks while all exchanges are under way, and
// expects true of it.
template <typename Body>
void expect_of_forked_child(Body body) {
  FakeNetwork network({1, 1}, 1);
  network.hold(true);
  std::latch started(2);
  std::latch forked(1);
  run_nodes(network, [&](auto region, int node, int /*index*/) {
    Group group(region);
    auto reducer = std::make_unique<BucketReducer>(
        group, test::nodes::kBuckets, test::nodes::bucket_name,
        BucketReducer::Options{.between_nodes = network.level(node)});
    reducer->begin_step({.forwards = 1});
    for (std::size_t b = 0; b < kCount; ++b) reducer->publish(b);
    while (network.started() < kCount) reducer->try_progress();
    started.arrive_and_wait();
    if (node == 1) return forked.wait();
    const pid_t child = ::fork();
    if (child == 0) ::_exit(body(network, reducer) ? 0 : 1);
    forked.count_down();
    int status = -1;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  });
}

TEST(SecondLevel, AForkedChildDestroysNoExchange) {
  expect_of_forked_child([](FakeNetwork& network, std::unique_ptr<BucketReducer>& reducer) {
    const int before = network.destroyed();
    reducer.reset();
    return network.destroyed() == before;
  });
}

TEST(SecondLevel, AForkedChildMayNotGoOnWithTheStep) {
  expect_of_forked_child([](FakeNetwork& network, std::unique_ptr<BucketReducer>& reducer) {
    const std::vector<std::function<void()>> calls{
        [&] { reducer->abort_step(); }, [&] { reducer->publish(0); }, [&] { reducer->skip(0); },
        [&] { reducer->try_progress(); }, [&] { reducer->finish(); }};
    const bool refused = std::ranges::all_of(calls, [](const auto& call) {
      try {
        call();
      } catch (const UsageError&) {
        return true;
      }
      return false;
    });
    return refused && network.aborts() == 0;
  });
}

// Rank 0 of the first node has nothing under way, and waits for the bucket that comes last.
TEST(SecondLevel, AWaitingRankIsWokenByEachBucketThatBecomesReady) {
  FakeNetwork network({2, 1}, 1);
  run_nodes(network, [&](auto region, int node, int index) {
    Group group(region);
    BucketReducer reducer(group, test::nodes::kBuckets, test::nodes::bucket_name,
                          {.between_nodes = network.level(node)});
    reducer.begin_step({.forwards = 1});
    for (std::size_t b = 0; b < kCount && index != 1; ++b) reducer.publish(b);
    for (std::size_t b = 1; b < kCount && index == 1; ++b) {
      const auto& doorbell = region->memory().rank_block(0).doorbell;
      while (doorbell.listeners == 0) std::this_thread::yield();
      const auto heard = doorbell.rings();
      reducer.publish(b);
      EXPECT_NE(doorbell.rings(), heard);
      while (!reducer.is_reduced(b)) reducer.try_progress();
    }
    if (index == 1) reducer.publish(0);
    reducer.finish();
  });
}

// On the first node, a rank sleeps in finish until the exchange with the other node is complete.
void expect_wake(int sleeper) {
  FakeNetwork network({2, 1}, 1);
  network.hold(true);
  run_nodes(network, [&](auto region, int node, int index) {
    Group group(region);
    BucketReducer reducer(group, std::span(test::nodes::kBuckets).first(1),
                          test::nodes::bucket_name, {.between_nodes = network.level(node)});
    reducer.begin_step({.forwards = 1});
    reducer.publish(0);
    if (node == 0 && index != sleeper) {
      await_finish(reducer, sleeper);
      const auto& doorbell = region->memory().rank_block(sleeper).doorbell;
      const auto heard = doorbell.rings();
      network.hold(false);
      while (!reducer.is_reduced(0)) std::this_thread::yield();
      EXPECT_NE(doorbell.rings(), heard);
    }
    reducer.finish();
  });
}

TEST(SecondLevel, ARankIsWokenWhenAnotherNodesPartArrives) {
  expect_wake(1);
}

TEST(SecondLevel, ARankIsWokenByTheLastRankOfItsNode) {
  expect_wake(0);
}

}  // namespace
}  // namespace paceline::shm
