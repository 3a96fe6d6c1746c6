#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <latch>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <paceline/error.h>

#include "shm/buckets/bucket_reducer.h"
#include "support/elements.h"
#include "support/fake_second_level.h"

namespace paceline::shm {
namespace {

using test::FakeNetwork;
using test::run_nodes;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr Bucket kBuckets[] = {
    {1000, DataType::float32, ReduceOp::avg}, {5, DataType::float32, ReduceOp::avg},
    {3333, DataType::float64, ReduceOp::sum}, {500, DataType::uint8, ReduceOp::max},
    {777, DataType::float16, ReduceOp::avg},  {130, DataType::bfloat16, ReduceOp::avg}};
constexpr std::size_t kCount = std::size(kBuckets);

std::string bucket_name(std::size_t bucket) {
  return "layer" + std::to_string(bucket);
}

// Small multiples of 1/8, which every type holds exactly; 0 or 1 in a bitmap.
double value_of(int index, std::size_t step, std::size_t bucket, std::size_t i) {
  const auto mixed = static_cast<int>((i * 7 + step * 3 + bucket * 5) % 11) + 13 * index;
  if (kBuckets[bucket].op == ReduceOp::max) return mixed % 4 == 0 ? 1 : 0;
  return (mixed % 31 - 15) / 8.0;
}

void fill(const BucketReducer& reducer, std::size_t bucket, int index, std::size_t step) {
  void* const data = reducer.data(bucket).get();
  for (std::size_t i = 0; i < kBuckets[bucket].count; ++i) {
    test::put(kBuckets[bucket].type, data, i, value_of(index, step, bucket, i));
  }
}

void expect_reduced(const BucketReducer& reducer, std::size_t bucket, std::size_t step,
                    const std::vector<double>& weights) {
  const auto& [count, type, op] = kBuckets[bucket];
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  for (std::size_t i = 0; i < count; ++i) {
    double sum = 0;
    for (std::size_t index = 0; index < weights.size(); ++index) {
      const double value = value_of(static_cast<int>(index), step, bucket, i);
      if (op == ReduceOp::max) sum = std::max(sum, value);
      if (op == ReduceOp::sum) sum += value;
      if (op == ReduceOp::avg) sum += value * weights[index] / total;
    }
    ASSERT_NEAR(test::get(type, reducer.data(bucket).get(), i).real(), sum,
                test::tolerance(type, 4))
        << "bucket " << bucket << " at " << i << " in step " << step;
  }
}

// What every rank has after every step, to be compared in the end.
class Results {
 public:
  explicit Results(std::size_t ranks) : by_rank_(ranks) {}

  void add(int index, const BucketReducer& reducer, std::size_t bucket) {
    const std::size_t bytes = kBuckets[bucket].count * element_size(kBuckets[bucket].type);
    const std::byte* const data = reducer.data(bucket).get();
    auto& all = by_rank_[static_cast<std::size_t>(index)];
    all.insert(all.end(), data, data + bytes);
  }
  void expect_the_same_everywhere() const {
    ASSERT_FALSE(by_rank_[0].empty());
    for (const auto& one : by_rank_) EXPECT_TRUE(one == by_rank_[0]);
  }

 private:
  std::vector<std::vector<std::byte>> by_rank_;
};

std::size_t ranks_of(const FakeNetwork& network) {
  std::size_t ranks = 0;
  for (const auto& node : network.nodes()) ranks += node.size();
  return ranks;
}

void publish_all(BucketReducer& reducer, int index, std::size_t step, std::mt19937& random) {
  std::vector<std::size_t> order(kCount);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  for (const std::size_t bucket : order) {
    fill(reducer, bucket, index, step);
    reducer.publish(bucket);
    if (random() % 2 == 0) reducer.try_progress();
  }
}

void run_step(BucketReducer& reducer, const FakeNetwork& network, int index, std::size_t step) {
  std::mt19937 random(static_cast<unsigned>(index + 100 * static_cast<int>(step)));
  reducer.begin_step({.forwards = static_cast<std::uint32_t>(step)});
  publish_all(reducer, index, step, random);
  reducer.finish();
  const std::vector<double> weights(ranks_of(network), 1.0);
  for (std::size_t b = 0; b < kCount; ++b) expect_reduced(reducer, b, step, weights);
}

template <typename Body>
void for_all_jobs(Body body) {
  for (const std::vector<int>& sizes : {std::vector{1}, {2, 2}, {1, 3}, {3, 2, 1}}) {
    const int most = *std::ranges::min_element(sizes);
    for (int lanes = 1; lanes <= most; ++lanes) {
      FakeNetwork network(sizes, lanes);
      body(network);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(SecondLevel, AveragesOverAllNodesWhateverTheOrder) {
  for_all_jobs([](FakeNetwork& network) {
    Results results(ranks_of(network));
    run_nodes(network, [&](auto region, int node, int index) {
      Group group(region);
      BucketReducer reducer(group, kBuckets, bucket_name, 0, {}, network.level(node));
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
      BucketReducer reducer(group, kBuckets, bucket_name, 0, {}, network.level(node));
      for (std::size_t step = 1; step <= 6; ++step) {
        std::vector<double> weights;
        for (std::size_t i = 0; i < ranks_of(network); ++i) {
          const bool first_node = i < network.nodes()[0].size();
          weights.push_back(step % 3 == 0 && first_node ? 0 : 8.0 + static_cast<double>(i));
        }
        const double weight = weights[static_cast<std::size_t>(index)];
        reducer.begin_step({.forwards = static_cast<std::uint32_t>(step)}, weight);
        for (std::size_t b = 0; b < kCount; ++b) {
          fill(reducer, b, index, step);
          if (weight == 0 && kBuckets[b].op == ReduceOp::avg) {
            const std::size_t bytes = kBuckets[b].count * element_size(kBuckets[b].type);
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
    BucketReducer reducer(group, kBuckets, bucket_name, 0, {}, network.level(node));
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
      const double first = test::get(kBuckets[skipped].type, reducer.data(skipped).get(), 0).real();
      EXPECT_EQ(first, value_of(index, step, skipped, 0));
    }
  });
}

// Runs steps until an error, which is expected of every rank.
template <typename ErrorType, typename Check>
void expect_error(const std::function<void()>& steps, Check check) {
  try {
    steps();
    ADD_FAILURE() << "no error";
  } catch (const ErrorType& error) {
    check(error);
  }
}

TEST(SecondLevel, AnExchangeThatFailsIsTheGroupsFailure) {
  FakeNetwork network({2, 1}, 1);
  network.fail(std::make_exception_ptr(PeerLost("its cable was cut", {102}, "send", 1)));
  run_nodes(network, [&](auto region, int node, int index) {
    Group group(region);
    BucketReducer reducer(group, kBuckets, bucket_name, 0, {}, network.level(node));
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
    BucketReducer reducer(group, kBuckets, bucket_name, 0, {}, network.level(node));
    run_step(reducer, network, index, 1);
    group.barrier();
    network.hold(true);
    if (node == 1) {
      EXPECT_THROW(run_step(reducer, network, index, 2), Mismatch);  // the others aborted
      EXPECT_TRUE(reducer.abandon_step());
      return;
    }
    expect_error<Timeout>([&] { run_step(reducer, network, index, 2); },
                          [&](const Timeout& error) {
                            EXPECT_THAT(error.ranks(), ElementsAre(102, 103, 104));
                            EXPECT_THAT(error.what(), HasSubstr("ranks 102, 103 and 104 did not "));
                          });
    for (int rank = 0; rank < region->size(); ++rank) EXPECT_EQ(reducer.finished(rank), 1u);
  });
}

TEST(SecondLevel, ANodeThatDoesNotBeginAStepIsNamed) {
  FakeNetwork network({2, 1}, 1);
  std::latch done(2);
  run_nodes(
      network,
      [&](auto region, int node, int index) {
        Group group(region);
        BucketReducer reducer(group, kBuckets, bucket_name, 0, {}, network.level(node));
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
  std::latch lost(2);
  run_nodes(network, [&](auto region, int node, int index) {
    Group group(region);
    std::size_t used = 0;
    {
      BucketReducer reducer(group, kBuckets, bucket_name, 0, {}, network.level(node));
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
          if (region->rings() != 0) region->abort("out of memory");
        }
        lost.count_down();
        return;
      }
      // Under way once this rank has begun to start what both have accumulated.
      while (network.started() == 0) reducer.try_progress();
      region->ring(1);
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

TEST(SecondLevel, StepAbortedOnOneNodeCanBeAbortedOnAll) {
  for_all_jobs([](FakeNetwork& network) {
    if (network.nodes().size() == 1) return;
    run_nodes(network, [&](auto region, int node, int index) {
      Group group(region);
      BucketReducer reducer(group, kBuckets, bucket_name, 0, {}, network.level(node));
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
          EXPECT_THAT(error.what(), HasSubstr("aborted step 2"));
        });
      }
      EXPECT_TRUE(reducer.abandon_step());
      for (std::size_t step = 3; step <= 5; ++step) run_step(reducer, network, index, step);
      if (region->rank() == 0) network.let_go();
      run_step(reducer, network, index, 6);
    });
  });
}

// Its last node gives a step up that has been reduced everywhere, and that others finish.
// No other rank has started anything that could tell it.
TEST(SecondLevel, StepAbortedBeforeAnyExchangeCanBeAbortedOnAll) {
  for_all_jobs([](FakeNetwork& network) {
    if (network.nodes().size() == 1) return;
    // Until they all know, node 0 does not begin the next step, which would tell them too.
    std::latch known(static_cast<std::ptrdiff_t>(ranks_of(network) - network.nodes()[0].size()));
    run_nodes(network, [&](auto region, int node, int index) {
      Group group(region);
      BucketReducer reducer(group, kBuckets, bucket_name, 0, {}, network.level(node));
      run_step(reducer, network, index, 1);
      std::mt19937 random(static_cast<unsigned>(index));
      reducer.begin_step({.forwards = 2});
      if (node != 0) {
        const auto rest = [&] {
          publish_all(reducer, index, 2, random);
          reducer.finish();
        };
        expect_error<Mismatch>(rest, [&](const Mismatch& error) {
          EXPECT_THAT(error.what(), HasSubstr("aborted step 2"));
        });
        known.count_down();
      }
      EXPECT_TRUE(reducer.abandon_step());
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
    BucketReducer reducer(group, std::span(kBuckets).first(buckets), bucket_name, 0, {},
                          network.level(node));
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
      EXPECT_THAT(error.what(), HasSubstr("gradients are in different buckets on rank 102: "));
    });
  });
}

TEST(SecondLevel, AStepThatAnotherNodeFinishedCannotBeGivenUp) {
  FakeNetwork network({2, 1}, 1);
  run_nodes(network, [&](auto region, int node, int index) {
    Group group(region);
    BucketReducer reducer(group, kBuckets, bucket_name, 0, {}, network.level(node));
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
      reducer.abandon_step();
    }
    expect_error<Mismatch>([&] { run_step(reducer, network, index, 2); },
                           [](const Mismatch& error) {
                             EXPECT_THAT(error.ranks(), ElementsAre(102));
                             EXPECT_THAT(
                                 error.what(),
                                 HasSubstr("rank 102 aborted step 1, which other nodes finished"));
                           });
  });
}

TEST(SecondLevel, ForwardsThatDifferBetweenNodesAreNamed) {
  FakeNetwork network({2, 1}, 1);
  run_nodes(network, [&](auto region, int node, int /*index*/) {
    Group group(region);
    BucketReducer reducer(group, kBuckets, bucket_name, 0, {}, network.level(node));
    reducer.begin_step({.forwards = node == 0 ? 1U : 2U});
    for (std::size_t b = 0; b < kCount; ++b) reducer.publish(b);
    expect_error<Mismatch>([&] { reducer.finish(); },
                           [](const Mismatch& error) {
                             EXPECT_THAT(error.ranks(), ElementsAre(102));
                             EXPECT_THAT(error.what(),
                                         HasSubstr("(rank 100 1, rank 101 1, rank 102 2)"));
                           });
  });
}

TEST(SecondLevel, ParametersFrozenOnOneNodeAreNamed) {
  FakeNetwork network({1, 2}, 1);
  run_nodes(network, [&](auto region, int node, int index) {
    Group group(region);
    BucketReducer reducer(group, kBuckets, bucket_name, 0, {"a", "b", "c"}, network.level(node));
    const std::vector<std::uint8_t> frozen{0, index == 0 ? std::uint8_t{1} : std::uint8_t{0}, 0};
    reducer.begin_step({.forwards = 1, .frozen = fingerprint(frozen)}, 1, frozen);
    for (std::size_t b = 0; b < kCount; ++b) reducer.publish(b);
    expect_error<Mismatch>([&] { reducer.finish(); },
                           [](const Mismatch& error) {
                             EXPECT_THAT(error.ranks(), ElementsAre(100));
                             EXPECT_THAT(error.what(), HasSubstr("b is frozen on rank 100"));
                           });
  });
}

TEST(SecondLevel, ModificationsThatDifferBetweenNodesShow) {
  FakeNetwork network({2, 1}, 1);
  run_nodes(network, [&](auto region, int node, int /*index*/) {
    Group group(region);
    BucketReducer reducer(group, kBuckets, bucket_name, 0, {}, network.level(node));
    for (std::uint32_t step = 1; step <= 4; ++step) {
      const bool differs = step % 2 == 0;
      reducer.begin_step({.forwards = step, .modifications = differs && node == 1 ? 1U : 0U});
      for (std::size_t b = 0; b < kCount; ++b) reducer.publish(b);
      reducer.finish();
      EXPECT_EQ(reducer.modified_apart(), differs);
    }
  });
}

}  // namespace
}  // namespace paceline::shm
