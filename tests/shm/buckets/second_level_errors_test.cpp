#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <latch>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <paceline/error.h>

#include "support/second_level_steps.h"

namespace paceline::shm {
namespace {

using test::FakeNetwork;
using test::run_nodes;
using test::nodes::expect_error;
using test::nodes::fill;
using test::nodes::kCount;
using test::nodes::publish_all;
using test::nodes::run_step;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(SecondLevel, AnExchangeThatFailsIsTheGroupsFailure) {
  FakeNetwork network({2, 1}, 1);
  network.fail(std::make_exception_ptr(PeerLost("its cable was cut", {102}, "send", 1)));
  run_nodes(network, [&](auto region, int node, int index) {
    Group group(region);
    BucketReducer reducer(group, test::nodes::kBuckets, test::nodes::bucket_name,
                          {.between_nodes = network.level(node)});
    expect_error<PeerLost>([&] { run_step(reducer, network, index, 1); },
                           [](const PeerLost& error) {
                             EXPECT_THAT(error.ranks(), ElementsAre(102));
                             EXPECT_THAT(error.what(), HasSubstr("its cable was cut"));
                             EXPECT_THAT(error.what(), HasSubstr("(layer"));
                           });
    EXPECT_TRUE(region->failed());
    for (int rank = 0; rank < region->size(); ++rank) EXPECT_EQ(reducer.finished(rank), 0u);
  });
}

// Both ranks of a node name the other's, whichever of them notices.
TEST(SecondLevel, AnExchangeThatDoesNotEndNamesTheOtherNodesRanks) {
  FakeNetwork network({2, 3}, 2);
  run_nodes(network, [&](auto region, int node, int index) {
    Group group(region);
    if (node == 0) group.set_timeout(std::chrono::seconds(4));
    BucketReducer reducer(group, test::nodes::kBuckets, test::nodes::bucket_name,
                          {.between_nodes = network.level(node)});
    run_step(reducer, network, index, 1);
    group.barrier();
    network.hold(true);
    if (node == 1) {
      EXPECT_THROW(run_step(reducer, network, index, 2), Mismatch);  // the others aborted
      EXPECT_TRUE(reducer.abort_step());
      return;
    }
    expect_error<Timeout>([&] { run_step(reducer, network, index, 2); },
                          [&](const Timeout& error) {
                            EXPECT_THAT(error.ranks(), ElementsAre(102, 103, 104));
                            EXPECT_THAT(error.what(),
                                        HasSubstr("ranks 102, 103 and 104 on node 1 did not "));
                          });
    for (int rank = 0; rank < region->size(); ++rank) EXPECT_EQ(reducer.finished(rank), 1u);
  });
}

// Which keeps the other ranks of its node from their exchanges.
TEST(SecondLevel, ALeaderThatDoesNotAnswerIsNamedAloneOfItsNode) {
  FakeNetwork network({2, 2, 2}, 2);
  network.hold(true);
  network.silence({102});
  run_nodes(network, [&](auto region, int node, int index) {
    Group group(region);
    if (node == 0) group.set_timeout(std::chrono::seconds(2));
    BucketReducer reducer(group, test::nodes::kBuckets, test::nodes::bucket_name,
                          {.between_nodes = network.level(node)});
    expect_error<PeerError>(
        [&] { run_step(reducer, network, index, 1); },
        [&](const PeerError& error) { EXPECT_THAT(error.ranks(), ElementsAre(102, 104, 105)); });
    EXPECT_EQ(region->failed(), node == 0);
  });
}

// Whose driver waits longer, and shows that it does.
TEST(SecondLevel, ARankThatWaitsForAnotherNodeIsNotBlamed) {
  FakeNetwork network({2, 1}, 1);
  network.hold(true);
  run_nodes(network, [&](auto region, int node, int index) {
    Group group(region);
    if (index == 1) group.set_timeout(std::chrono::seconds(2));
    BucketReducer reducer(group, test::nodes::kBuckets, test::nodes::bucket_name,
                          {.between_nodes = network.level(node)});
    expect_error<PeerError>(
        [&] { run_step(reducer, network, index, 1); },
        [](const PeerError& error) { EXPECT_THAT(error.ranks(), ElementsAre(102)); });
    EXPECT_EQ(region->failed(), node == 0);
  });
}

// It has said for whom it waits before it hangs.
TEST(SecondLevel, ARankThatHangsIsBlamedAndNotTheNodeItWaitedFor) {
  FakeNetwork network({3, 1}, 1);
  network.hold(true);
  network.hang(0);
  std::latch named(2);
  run_nodes(network, [&](auto region, int node, int index) {
    Group group(region);
    if (node == 0) group.set_timeout(std::chrono::seconds(2));
    BucketReducer reducer(group, test::nodes::kBuckets, test::nodes::bucket_name,
                          {.between_nodes = network.level(node)});
    expect_error<PeerError>(
        [&] { run_step(reducer, network, index, 1); },
        [](const PeerError& error) { EXPECT_THAT(error.ranks(), ElementsAre(100)); });
    if (index != 1 && index != 2) return;
    named.count_down();
    named.wait();
    network.hang(std::nullopt);
  });
}

// Its node's deadline is later than the other's, by less than waits for other nodes are extended.
TEST(SecondLevel, ARankThatHangsInItsBackwardIsNamedByEveryNode) {
  FakeNetwork network({2, 2}, 2);
  std::latch named(3);
  run_nodes(network, [&](auto region, int node, int index) {
    Group group(region);
    group.set_timeout(std::chrono::milliseconds(node == 0 ? 1300 : 1000));
    BucketReducer reducer(group, test::nodes::kBuckets, test::nodes::bucket_name,
                          {.between_nodes = network.level(node)});
    reducer.begin_step({.forwards = 1});
    if (index == 1) return named.wait();
    for (std::size_t b = 0; b < kCount; ++b) reducer.publish(b);
    expect_error<PeerError>([&] { reducer.finish(); },
                            [](const PeerError& error) {
                              EXPECT_THAT(error.ranks(), ElementsAre(101)) << error.what();
                            });
    EXPECT_EQ(region->failed(), node == 0);
    named.count_down();
    if (node == 0) return;
    EXPECT_TRUE(reducer.abort_step());
  });
}

// Rank 102 hangs for a moment in which rank 103 reaches its deadline and rank 100 aborts the step.
TEST(SecondLevel, AnAbortAfterTheDeadlineIsNotTakenForALateRank) {
  FakeNetwork network({2, 2}, 2);
  network.hold(true);
  constexpr std::chrono::milliseconds kTimeout{500};
  std::latch overdue(1);
  std::latch aborted(1);
  std::optional<base::Deadline> deadline;
  int checks = 0;
  network.on_awaited([&](int index) {
    if (index != 3 || !network.hung()) return;
    if (!deadline) deadline = base::Deadline::after(kTimeout);
    if (!deadline->expired() || ++checks != 2) return;
    overdue.count_down();
    aborted.wait();
  });
  run_nodes(network, [&](auto region, int node, int index) {
    Group group(region);
    if (index == 3) group.set_timeout(kTimeout);
    BucketReducer reducer(group, std::span(test::nodes::kBuckets).first(1),
                          test::nodes::bucket_name, {.between_nodes = network.level(node)});
    reducer.begin_step({.forwards = 1});
    reducer.publish(0);
    if (index == 0 || index == 3) {
      while (network.started() < 2) reducer.try_progress();
    }
    if (index == 0) {
      overdue.wait();
      EXPECT_TRUE(reducer.abort_step());
      return;
    }
    if (index == 3) {
      network.hang(2);
      while (!network.hung()) reducer.try_progress();
    }
    expect_error<PeerError>([&] { reducer.finish(); },
                            [](const PeerError& error) {
                              EXPECT_THAT(error.ranks(), ElementsAre(100)) << error.what();
                            });
    if (index == 1) network.hang(std::nullopt);
    if (index == 2) aborted.count_down();
    EXPECT_TRUE(reducer.abort_step());
    EXPECT_FALSE(region->failed());
  });
}

// Rank 102 has no exchange of its own, and rank 101 aborts the step only later.
TEST(SecondLevel, ARankThatLearnedOfAnAbortEndsItsPeersWaits) {
  FakeNetwork network({1, 2}, 1);
  network.hold(true);
  std::latch learned(1);
  run_nodes(
      network,
      [&](auto region, int node, int index) {
        Group group(region);
        BucketReducer reducer(group, test::nodes::kBuckets, test::nodes::bucket_name,
                              {.between_nodes = network.level(node)});
        reducer.begin_step({.forwards = 1});
        for (std::size_t b = 0; b < kCount; ++b) reducer.publish(b);
        if (index == 0) {
          while (network.started() == 0) reducer.try_progress();
        } else {
          expect_error<PeerError>([&] { reducer.finish(); },
                                  [](const PeerError& error) {
                                    EXPECT_THAT(error.ranks(), ElementsAre(100)) << error.what();
                                  });
          index == 1 ? learned.wait() : learned.count_down();
        }
        EXPECT_TRUE(reducer.abort_step());
      },
      std::chrono::seconds(4));
}

TEST(SecondLevel, ANodeThatDoesNotBeginAStepIsNamed) {
  FakeNetwork network({2, 1}, 1);
  std::latch done(2);
  run_nodes(
      network,
      [&](auto region, int node, int index) {
        Group group(region);
        BucketReducer reducer(group, test::nodes::kBuckets, test::nodes::bucket_name,
                              {.between_nodes = network.level(node)});
        if (node == 1) return done.wait();
        expect_error<Timeout>(
            [&] { run_step(reducer, network, index, 1); },
            [](const Timeout& error) { EXPECT_THAT(error.ranks(), ElementsAre(102)); });
        done.count_down();
      },
      std::chrono::seconds(4));
}

// Rank 1 of the first node goes while an exchange is under way, whose buffer may be written later.
TEST(SecondLevel, AFailureOfTheNodeCancelsItsExchanges) {
  FakeNetwork network({2, 1}, 1);
  network.hold(true);
  std::latch under_way(1);
  std::latch lost(2);
  run_nodes(network, [&](auto region, int node, int index) {
    Group group(region);
    std::size_t used = 0;
    {
      BucketReducer reducer(group, test::nodes::kBuckets, test::nodes::bucket_name,
                            {.between_nodes = network.level(node)});
      reducer.begin_step({.forwards = 1});
      for (std::size_t b = 0; b < kCount; ++b) reducer.publish(b);
      if (node == 1) {
        EXPECT_THROW(reducer.finish(), Mismatch);  // the other aborted
        lost.wait();
        return;
      }
      if (index == 1) {
        while (!reducer.is_reduced(0) && !region->failed()) {
          reducer.try_progress();
          if (under_way.try_wait()) region->abort("out of memory");
        }
        lost.count_down();
        return;
      }
      // Under way once this rank has begun to start what both have accumulated.
      while (network.started() == 0) reducer.try_progress();
      under_way.count_down();
      expect_error<PeerLost>([&] { reducer.finish(); },
                             [](const PeerLost& error) {
                               EXPECT_THAT(error.ranks(), ElementsAre(101));
                               EXPECT_THAT(error.what(), HasSubstr("out of memory"));
                             });
      used = region->memory().bytes_in_use();
      EXPECT_EQ(reducer.finished(1), 0u);
    }
    EXPECT_GT(network.let_go(), 0u);
    EXPECT_LT(region->memory().bytes_in_use(), used);
    lost.count_down();
  });
}

// Calls body(network, culprit) for each rank of each job of several nodes.
template <typename Body>
void for_all_culprits(Body body) {
  for (const std::vector<int>& sizes : {std::vector{2, 2}, {1, 3}, {3, 2, 1}}) {
    const int most = *std::ranges::min_element(sizes);
    const int ranks = std::accumulate(sizes.begin(), sizes.end(), 0);
    for (int lanes = 1; lanes <= most; ++lanes) {
      for (int culprit = 0; culprit < ranks; ++culprit) {
        FakeNetwork network(sizes, lanes);
        body(network, culprit);
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

// It aborts before any exchange of the step, and after one.
TEST(SecondLevel, EveryRankOfEveryNodeNamesTheRankThatAborted) {
  for_all_culprits([](FakeNetwork& network, int culprit) {
    const std::string named = "because of rank " + std::to_string(network.global_rank_of(culprit)) +
                              " on node " + std::to_string(network.node_of(culprit));
    run_nodes(network, [&](auto region, int node, int index) {
      Group group(region);
      BucketReducer reducer(group, test::nodes::kBuckets, test::nodes::bucket_name,
                            {.between_nodes = network.level(node)});
      for (std::size_t step = 1; step <= 4; step += 2) {
        run_step(reducer, network, index, step);
        std::mt19937 random(static_cast<unsigned>(index));
        reducer.begin_step({.forwards = static_cast<std::uint32_t>(step + 1)});
        if (index == culprit) {
          fill(reducer, 0, index, step + 1);
          reducer.publish(0);
          while (step > 1 && !reducer.is_reduced(0)) reducer.try_progress();
        } else {
          const auto rest = [&] {
            publish_all(reducer, index, step + 1, random);
            reducer.finish();
          };
          expect_error<Mismatch>(rest, [&](const Mismatch& error) {
            EXPECT_THAT(error.ranks(), ElementsAre(FakeNetwork::global_rank_of(culprit)))
                << "on rank " << FakeNetwork::global_rank_of(index) << ": " << error.what();
            if (node != network.node_of(culprit)) {
              EXPECT_THAT(error.what(), HasSubstr(named));
            }
          });
        }
        EXPECT_TRUE(reducer.abort_step());
      }
    });
  });
}

// The transport tells only the first node of the death.
TEST(SecondLevel, EveryRankOfEveryNodeNamesTheRankThatDied) {
  for_all_culprits([](FakeNetwork& network, int culprit) {
    const auto& first = network.nodes()[0];
    if (culprit < static_cast<int>(first.size())) return;
    const int number = FakeNetwork::global_rank_of(culprit);
    network.fail(std::make_exception_ptr(PeerLost("its process ended", {number}, "send", 1)), 0);
    std::latch noticed(static_cast<std::ptrdiff_t>(first.size()));
    run_nodes(network, [&](auto region, int node, int index) {
      Group group(region);
      BucketReducer reducer(group, test::nodes::kBuckets, test::nodes::bucket_name,
                            {.between_nodes = network.level(node)});
      if (index == culprit) {
        reducer.begin_step({.forwards = 1});
        for (std::size_t b = 0; b < kCount; ++b) reducer.publish(b);
        try {
          while (!noticed.try_wait()) reducer.try_progress();
        } catch (const Mismatch&) {  // if it drives an exchange
        }
        return region->abort("it died");
      }
      expect_error<PeerError>([&] { run_step(reducer, network, index, 1); },
                              [&](const PeerError& error) {
                                EXPECT_THAT(error.ranks(), ElementsAre(number))
                                    << "on rank " << FakeNetwork::global_rank_of(index) << ": "
                                    << error.what();
                              });
      if (node != 0) return;
      EXPECT_TRUE(region->failed());
      noticed.count_down();
    });
  });
}

// Rank 101 is lost, and rank 100 learns it from a call of the group before its step ends.
void expect_lost_rank_named(const std::function<void(std::unique_ptr<BucketReducer>)>& end_step) {
  FakeNetwork network({2, 1}, 1);
  std::latch begun(2);
  std::latch lost(1);
  std::latch done(1);
  run_nodes(network, [&](auto region, int node, int index) {
    Group group(region);
    auto reducer = std::make_unique<BucketReducer>(
        group, test::nodes::kBuckets, test::nodes::bucket_name,
        BucketReducer::Options{.between_nodes = network.level(node)});
    reducer->begin_step({.forwards = 1});
    if (node == 1) {
      for (std::size_t b = 0; b < kCount; ++b) reducer->publish(b);
      expect_error<Mismatch>([&] { reducer->finish(); },
                             [](const Mismatch& error) {
                               EXPECT_THAT(error.ranks(), ElementsAre(101)) << error.what();
                             });
      return done.count_down();
    }
    begun.arrive_and_wait();
    if (index == 1) {
      region->abort("its process ended");
      lost.count_down();
    } else {
      lost.wait();
      EXPECT_THROW(group.barrier(), PeerLost);
      end_step(std::move(reducer));
    }
    done.wait();
  });
}

TEST(SecondLevel, ADestroyedReducerOfAFailedGroupNamesTheRankAtFault) {
  expect_lost_rank_named([](std::unique_ptr<BucketReducer> reducer) { reducer.reset(); });
}

TEST(SecondLevel, AStepAbortedAfterAFailureNamesTheRankAtFault) {
  expect_lost_rank_named([](std::unique_ptr<BucketReducer> reducer) {
    EXPECT_THROW(reducer->abort_step(), PeerLost);
  });
}

// As where a rank was lost while it reported the failure.
TEST(SecondLevel, NoRankIsBlamedForAFailureThatNamesNone) {
  FakeNetwork network({2, 2}, 1);
  network.hold(true);
  run_nodes(network, [&](auto region, int node, int index) {
    Group group(region);
    BucketReducer reducer(group, test::nodes::kBuckets, test::nodes::bucket_name,
                          {.between_nodes = network.level(node)});
    reducer.begin_step({.forwards = 1});
    for (std::size_t b = 0; b < kCount; ++b) reducer.publish(b);
    if (index == 0) {
      while (network.started() == 0) reducer.try_progress();
      region->memory().group_block().failure.record({FailureKind::peer_lost, {}, "lost"});
    }
    expect_error<PeerError>([&] { reducer.finish(); },
                            [&](const PeerError& error) {
                              EXPECT_THAT(error.ranks(), IsEmpty()) << error.what();
                              if (node == 0) return;
                              EXPECT_THAT(error.what(), HasSubstr("because of an unknown rank"));
                            });
    if (node == 0) return;
    EXPECT_TRUE(reducer.abort_step());
  });
}

TEST(SecondLevel, ARankOutsideTheJobIsNamedWithoutANode) {
  FakeNetwork network({1, 1}, 1);
  network.fail(std::make_exception_ptr(PeerLost("its process ended", {7}, "send", 1)), 0);
  run_nodes(network, [&](auto region, int node, int index) {
    Group group(region);
    BucketReducer reducer(group, test::nodes::kBuckets, test::nodes::bucket_name,
                          {.between_nodes = network.level(node)});
    expect_error<PeerError>([&] { run_step(reducer, network, index, 1); },
                            [&](const PeerError& error) {
                              EXPECT_THAT(error.ranks(), ElementsAre(7));
                              if (node == 0) return;
                              EXPECT_THAT(error.what(), HasSubstr("because of rank 7, before"));
                            });
  });
}

TEST(SecondLevel, ARankWithoutRoomForItsSumsHasNotLetTheOthersGoOn) {
  FakeNetwork network({2}, 2);
  constexpr Bucket kLarge[] = {{std::size_t{10} << 20, DataType::float16, ReduceOp::avg}};
  run_nodes(network, [&](auto region, int node, int index) {
    Group group(region);
    const auto make = [&] {
      const BucketReducer reducer(group, kLarge, test::nodes::bucket_name,
                                  {.between_nodes = network.level(node)});
    };
    if (index == 1) {
      region->allocate_or_throw(std::size_t{30} << 20);
      EXPECT_THROW(make(), Error);
      for (const std::uint32_t round : {0U, 1U}) {
        EXPECT_EQ(region->memory().slot(1, round).round, 0U) << "it has exchanged control blocks";
      }
      return region->abort("no room");
    }
    EXPECT_THROW(make(), PeerLost);
  });
}

}  // namespace
}  // namespace paceline::shm
