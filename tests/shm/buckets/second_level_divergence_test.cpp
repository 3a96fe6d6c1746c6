#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <latch>
#include <random>
#include <span>
#include <vector>

#include <paceline/error.h>

#include "support/second_level_steps.h"

// Steps that one node aborts, or in which it does something else than the others.
namespace paceline::shm {
namespace {

using test::FakeNetwork;
using test::run_nodes;
using test::nodes::expect_error;
using test::nodes::fill;
using test::nodes::for_all_jobs;
using test::nodes::kCount;
using test::nodes::publish_all;
using test::nodes::ranks_of;
using test::nodes::run_step;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(SecondLevel, StepAbortedOnOneNodeCanBeAbortedOnAll) {
  for_all_jobs([](FakeNetwork& network) {
    if (network.nodes().size() == 1) return;
    run_nodes(network, [&](auto region, int node, int index) {
      Group group(region);
      BucketReducer reducer(group, test::nodes::kBuckets, test::nodes::bucket_name,
                            {.between_nodes = network.level(node)});
      run_step(reducer, network, index, 1);
      std::mt19937 random(static_cast<unsigned>(index));
      reducer.begin_step({.forwards = 2});
      if (node == 0) {
        fill(reducer, 0, index, 2);
        reducer.publish(0);
        while (!reducer.is_reduced(0)) reducer.try_progress();  // and the others' lanes are started
      } else {
        const auto rest = [&] {
          publish_all(reducer, index, 2, random);
          reducer.finish();
        };
        expect_error<Mismatch>(rest, [&](const Mismatch& error) {
          EXPECT_THAT(error.what(), HasSubstr("aborted step 2 of group test because of rank"));
        });
      }
      EXPECT_TRUE(reducer.abort_step());
      for (std::size_t step = 3; step <= 5; ++step) run_step(reducer, network, index, step);
      if (region->rank() == 0) network.let_go();
      run_step(reducer, network, index, 6);
    });
  });
}

// No other rank has started anything that could tell it.
TEST(SecondLevel, StepAbortedBeforeAnyExchangeCanBeAbortedOnAll) {
  for_all_jobs([](FakeNetwork& network) {
    if (network.nodes().size() == 1) return;
    // Until they all know, node 0 does not begin the next step, which would tell them too.
    std::latch known(static_cast<std::ptrdiff_t>(ranks_of(network) - network.nodes()[0].size()));
    run_nodes(network, [&](auto region, int node, int index) {
      Group group(region);
      BucketReducer reducer(group, test::nodes::kBuckets, test::nodes::bucket_name,
                            {.between_nodes = network.level(node)});
      run_step(reducer, network, index, 1);
      std::mt19937 random(static_cast<unsigned>(index));
      reducer.begin_step({.forwards = 2});
      if (node != 0) {
        const auto rest = [&] {
          publish_all(reducer, index, 2, random);
          reducer.finish();
        };
        expect_error<Mismatch>(rest, [&](const Mismatch& error) {
          EXPECT_THAT(error.what(), HasSubstr("aborted step 2 of group test because of rank"));
        });
        known.count_down();
      }
      EXPECT_TRUE(reducer.abort_step());
      known.wait();
      for (std::size_t step = 3; step <= 5; ++step) run_step(reducer, network, index, step);
    });
  });
}

TEST(SecondLevel, BucketsThatDifferBetweenNodesAreRefused) {
  FakeNetwork network({2, 1}, 1);
  run_nodes(network, [&](auto region, int node, int index) {
    Group group(region);
    const std::size_t buckets = node == 0 ? kCount : kCount - 1;
    BucketReducer reducer(group, std::span(test::nodes::kBuckets).first(buckets),
                          test::nodes::bucket_name, {.between_nodes = network.level(node)});
    const auto step = [&] {
      reducer.begin_step({.forwards = 1});
      for (std::size_t bucket = 0; bucket < buckets; ++bucket) {
        fill(reducer, bucket, index, 1);
        reducer.publish(bucket);
      }
      reducer.finish();
    };
    expect_error<Mismatch>(step, [](const Mismatch& error) {
      EXPECT_THAT(error.ranks(), ElementsAre(102));
      EXPECT_THAT(error.what(),
                  HasSubstr("gradients are in different buckets on rank 102 on node 1: "));
    });
  });
}

// Its last node aborts a step that is reduced everywhere and that others finish.
TEST(SecondLevel, AStepThatAnotherNodeFinishedCannotBeAborted) {
  FakeNetwork network({2, 1}, 1);
  run_nodes(network, [&](auto region, int node, int index) {
    Group group(region);
    BucketReducer reducer(group, test::nodes::kBuckets, test::nodes::bucket_name,
                          {.between_nodes = network.level(node)});
    std::mt19937 random(1);
    reducer.begin_step({.forwards = 1});
    publish_all(reducer, index, 1, random);
    if (node == 0) {
      reducer.finish();
    } else {
      const auto is_reduced = [&](std::size_t b) { return reducer.is_reduced(b); };
      while (!(is_reduced(0) && is_reduced(1) && is_reduced(2) && is_reduced(3) && is_reduced(4) &&
               is_reduced(5))) {
        reducer.try_progress();
      }
      reducer.abort_step();
    }
    expect_error<Mismatch>(
        [&] { run_step(reducer, network, index, 2); },
        [](const Mismatch& error) {
          EXPECT_THAT(error.ranks(), ElementsAre(102));
          EXPECT_THAT(error.what(),
                      HasSubstr("rank 102 on node 1 aborted step 1, which other nodes finished"));
        });
  });
}

TEST(SecondLevel, ForwardsThatDifferBetweenNodesAreNamed) {
  FakeNetwork network({2, 1}, 1);
  run_nodes(network, [&](auto region, int node, int /*index*/) {
    Group group(region);
    BucketReducer reducer(group, test::nodes::kBuckets, test::nodes::bucket_name,
                          {.between_nodes = network.level(node)});
    reducer.begin_step({.forwards = node == 0 ? 1U : 2U});
    for (std::size_t b = 0; b < kCount; ++b) reducer.publish(b);
    expect_error<Mismatch>(
        [&] { reducer.finish(); },
        [](const Mismatch& error) {
          EXPECT_THAT(error.ranks(), ElementsAre(102));
          EXPECT_THAT(error.what(),
                      HasSubstr("(ranks 100 and 101 on node 0: 1; rank 102 on node 1: 2)"));
        });
  });
}

TEST(SecondLevel, ParametersFrozenOnOneNodeAreNamed) {
  FakeNetwork network({1, 2}, 1);
  run_nodes(network, [&](auto region, int node, int index) {
    Group group(region);
    BucketReducer reducer(group, test::nodes::kBuckets, test::nodes::bucket_name,
                          {.parameters = {"a", "b", "c"}, .between_nodes = network.level(node)});
    const std::vector<std::uint8_t> frozen{0, index == 0 ? std::uint8_t{1} : std::uint8_t{0}, 0};
    reducer.begin_step({.forwards = 1, .frozen = fingerprint(frozen)}, {}, frozen);
    for (std::size_t b = 0; b < kCount; ++b) reducer.publish(b);
    expect_error<Mismatch>([&] { reducer.finish(); },
                           [](const Mismatch& error) {
                             EXPECT_THAT(error.ranks(), ElementsAre(100));
                             EXPECT_THAT(error.what(),
                                         HasSubstr("b is frozen on rank 100 on node 0"));
                           });
  });
}

}  // namespace
}  // namespace paceline::shm
