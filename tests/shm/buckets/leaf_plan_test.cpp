#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <tuple>

#include <paceline/error.h>

#include "shm/buckets/bucket_reducer.h"
#include "shm/buckets/leaf_plan.h"
#include "support/kernel_oracle.h"
#include "support/thread_ranks.h"

namespace paceline::shm {
namespace {

using namespace test::exact;
using test::run_thread_ranks;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(LeafPlan, CutsEachRangeIntoAsFewNodesAsPossible) {
  const LeafPlan plan({{3, 5}, {0, 3}, {8, 4}});
  EXPECT_THAT(plan.parts(0), ::testing::ElementsAre(LeafRange{3, 1}, LeafRange{4, 4}));
  EXPECT_THAT(plan.parts(1), ::testing::ElementsAre(LeafRange{0, 2}, LeafRange{2, 1}));
  EXPECT_THAT(plan.parts(2), ::testing::ElementsAre(LeafRange{8, 4}));
  EXPECT_EQ(plan.leaves(), 12);
  EXPECT_EQ(plan.most_leaves(), 5);
  EXPECT_EQ(plan.most_parts(), 2u);
}

// Other backends add for themselves.
TEST(LeafPlan, HasOneLeafForEachOfAnyNumberOfRanks) {
  const LeafPlan plan(256);
  EXPECT_EQ(plan.leaves(), 256);
  EXPECT_EQ(plan.range(255), (LeafRange{255, 1}));
  EXPECT_THROW(LeafPlan::even(256, 256), UsageError);
}

TEST(LeafPlan, LeavesTheLastLeafApart) {
  const LeafPlan plan({{0, 8}, {8, 1}, {9, 2}}, LeafPlan::Parts::last_leaf_apart);
  EXPECT_THAT(plan.parts(0), ::testing::ElementsAre(LeafRange{0, 4}, LeafRange{4, 2},
                                                    LeafRange{6, 1}, LeafRange{7, 1}));
  EXPECT_THAT(plan.parts(1), ::testing::ElementsAre(LeafRange{8, 1}));
  EXPECT_THAT(plan.parts(2), ::testing::ElementsAre(LeafRange{9, 1}, LeafRange{10, 1}));
}

using LeafPlanParts = ::testing::TestWithParam<LeafPlan::Parts>;
INSTANTIATE_TEST_SUITE_P(, LeafPlanParts,
                         ::testing::Values(LeafPlan::Parts::fewest,
                                           LeafPlan::Parts::last_leaf_apart));

TEST_P(LeafPlanParts, AreNodesOfTheTree) {
  for (int leaves = 1; leaves <= 64; ++leaves) {
    for (int ranks = 1; ranks <= leaves; ++ranks) {
      const LeafPlan plan = LeafPlan::even(leaves, ranks, GetParam());
      int next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        EXPECT_LE(plan.range(0).count - plan.range(rank).count, 1);
        for (const auto& [first, count] : plan.parts(rank)) {
          EXPECT_EQ(first, next);
          EXPECT_TRUE(std::has_single_bit(static_cast<unsigned>(count)));
          EXPECT_EQ(first % count, 0);
          next += count;
        }
      }
      EXPECT_EQ(next, leaves);
    }
  }
}

TEST(LeafPlan, RejectsRangesThatAreNotAPartition) {
  const auto make = [](const std::vector<LeafRange>& ranges) {
    return [=] { static_cast<void>(LeafPlan(ranges)); };
  };
  EXPECT_THAT(make({{0, 2}, {1, 2}}), ThrowsMessage<UsageError>(HasSubstr("begin with leaf 2")));
  EXPECT_THAT(make({{0, 2}, {3, 1}}), ThrowsMessage<UsageError>(HasSubstr("begin with leaf 2")));
  EXPECT_THAT(make({{1, 2}}), ThrowsMessage<UsageError>(HasSubstr("begin with leaf 0")));
  EXPECT_THAT(make({{0, 2}, {2, 0}}),
              ThrowsMessage<UsageError>(HasSubstr("no range may be empty")));
  EXPECT_THAT(make({{0, -1}}), ThrowsMessage<UsageError>(HasSubstr("no range may be empty")));
  EXPECT_THAT([] { static_cast<void>(LeafPlan::even(128, 100)); },
              ThrowsMessage<UsageError>(HasSubstr("64 are allowed")));
}

// The weight of a leaf in a step; every third step has none, and every other has zeros.
double weight_of(int leaf, int leaves, int step) {
  if (step % 3 == 0) return 1;
  const bool is_zero = step % 2 == 0 && leaf % 3 == 1 && leaves > 1;
  return is_zero ? 0 : 0.3 * (leaf + step);
}

template <typename T>
std::vector<std::vector<T>> values_of(int leaves, std::size_t count, int step) {
  std::mt19937_64 random(static_cast<std::uint64_t>(leaves * 100 + step));
  std::vector<std::vector<T>> values(static_cast<std::size_t>(leaves));
  for (auto& of_leaf : values) {
    for (std::size_t i = 0; i < count; ++i) of_leaf.push_back(random_value<T>(random));
  }
  return values;
}

// The weighted average of all leaves, one element at a time.
template <typename T>
Bytes expected_average(const std::vector<std::vector<T>>& values, int step) {
  const int leaves = static_cast<int>(values.size());
  double divisor = 0;
  for (int leaf = 0; leaf < leaves; ++leaf) divisor += weight_of(leaf, leaves, step);
  std::vector<T> result;
  for (std::size_t i = 0; i < values[0].size(); ++i) {
    using Sum = decltype(weighted(T{}, 1.0));
    std::vector<std::optional<Sum>> nodes;
    for (int leaf = 0; leaf < leaves; ++leaf) {
      const double weight = weight_of(leaf, leaves, step);
      nodes.emplace_back();
      if (weight != 0) nodes.back() = weighted(values[static_cast<std::size_t>(leaf)][i], weight);
    }
    const Sum sum =
        root_of(nodes, [](Sum a, Sum b) { return test::exact::step(ReduceOp::sum, a, b); });
    result.push_back(narrowed<T>(divided(sum, divisor)));
  }
  return bytes_of(result);
}

template <typename T>
void fill_part(const LeafRange& part, const std::vector<std::vector<T>>& values, DataType type,
               int step, const LeafPlan& plan, std::byte* to) {
  std::vector<const void*> sources;
  std::vector<double> weights;
  std::vector<int> leaves;
  for (int leaf = part.first; leaf < part.first + part.count; ++leaf) {
    const double weight = part.count == 1 ? 1 : weight_of(leaf, plan.leaves(), step);
    if (weight == 0) continue;
    sources.push_back(values[static_cast<std::size_t>(leaf)].data());
    weights.push_back(weight);
    leaves.push_back(leaf);
  }
  if (sources.empty()) return;
  accumulate(type, ReduceOp::sum, {sources, weights, leaves}, to, values[0].size());
}

template <typename T>
void check_averages(DataType type, const LeafPlan& plan, int ranks, bool in_place) {
  constexpr std::size_t kCount = 100;
  run_thread_ranks(ranks, [&](auto region) {
    Group group(region);
    const Bucket buckets[] = {{kCount, type, ReduceOp::avg}, {1, DataType::int64, ReduceOp::max}};
    BucketReducer reducer(group, buckets, [](std::size_t) { return "a layer"; }, {.leaves = plan});
    const LeafRange own = plan.range(region->rank());
    const std::size_t size = kCount * element_size(plan.part_type(type));
    for (int step = 1; step <= 6; ++step) {
      const auto values = values_of<T>(plan.leaves(), kCount, step);
      std::vector<double> weights;
      for (int leaf = own.first; leaf < own.first + own.count; ++leaf) {
        weights.push_back(weight_of(leaf, plan.leaves(), step));
      }
      reducer.begin_step({}, weights);
      std::vector<void*> blocks;
      const auto parts = plan.parts(region->rank());
      for (std::size_t p = 0; p < parts.size(); ++p) {
        std::byte* to =
            p < reducer.parts(0).size() ? reducer.parts(0)[p].get() : reducer.data(0).get();
        if (in_place) {
          blocks.push_back(region->allocate_or_throw(size));
          ASSERT_TRUE(reducer.use_in_place(0, blocks.back(), p));
          to = static_cast<std::byte*>(blocks.back());
        }
        std::memset(to, 0xff, size);  // NaN
        if (plan.one_each()) {
          std::memcpy(to, values[static_cast<std::size_t>(own.first)].data(), size);
        } else {
          fill_part(parts[p], values, type, step, plan, to);
        }
      }
      *reinterpret_cast<std::int64_t*>(reducer.data(1).get()) = region->rank();
      reducer.publish(0);
      reducer.publish(1);
      reducer.finish();
      const bool widened = plan.part_type(type) != type;
      const void* const result = in_place && !widened ? blocks.back() : reducer.data(0).get();
      const Bytes expected = expected_average(values, step);
      ASSERT_EQ(std::memcmp(result, expected.data(), expected.size()), 0)
          << name(type) << ", step " << step << ", " << plan.leaves() << " leaves on " << ranks;
      ASSERT_EQ(*reinterpret_cast<std::int64_t*>(reducer.data(1).get()), ranks - 1);
      group.barrier();
      for (void* const block : blocks) region->memory().free(block);
    }
  });
}

TEST_P(LeafPlanParts, GiveTheSameAveragesOnAnyNumberOfRanks) {
  for (const auto& [leaves, ranks] : std::vector<std::pair<int, int>>{
           {2, 1}, {3, 2}, {8, 1}, {8, 2}, {8, 3}, {8, 5}, {12, 4}, {12, 5}, {7, 7}}) {
    const LeafPlan plan = LeafPlan::even(leaves, ranks, GetParam());
    for (const bool in_place : {false, true}) {
      if (in_place && plan.one_each()) continue;
      check_averages<float>(DataType::float32, plan, ranks, in_place);
      check_averages<double>(DataType::float64, plan, ranks, in_place);
      check_averages<Float16>(DataType::float16, plan, ranks, in_place);
      check_averages<BFloat16>(DataType::bfloat16, plan, ranks, in_place);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(LeafPlan, RangesNeedNotFollowTheOrderOfRanks) {
  const LeafPlan plan({{5, 3}, {0, 1}, {1, 4}});
  check_averages<float>(DataType::float32, plan, 3, true);
  check_averages<BFloat16>(DataType::bfloat16, plan, 3, false);
}

TEST(LeafPlan, RanksMustExpectTheSameRanges) {
  run_thread_ranks(2, [](auto region) {
    Group group(region);
    const Bucket buckets[] = {{1, DataType::float32, ReduceOp::avg}};
    const LeafPlan plan(region->rank() == 0 ? std::vector<LeafRange>{{0, 3}, {3, 1}}
                                            : std::vector<LeafRange>{{0, 2}, {2, 2}});
    EXPECT_THAT(
        [&] {
          BucketReducer(group, buckets, [](std::size_t) { return "a layer"; }, {.leaves = plan});
        },
        ThrowsMessage<Mismatch>(HasSubstr("all ranks must be given the same ranges")));
  });
}

TEST(LeafPlan, RanksMustExpectTheSameNumberOfLeaves) {
  run_thread_ranks(2, [](auto region) {
    Group group(region);
    const Bucket buckets[] = {{1, DataType::float32, ReduceOp::avg}};
    const LeafPlan plan = LeafPlan::even(region->rank() == 0 ? 2 : 4, 2);
    EXPECT_THAT(
        [&] {
          BucketReducer(group, buckets, [](std::size_t) { return "a layer"; }, {.leaves = plan});
        },
        ThrowsMessage<Mismatch>(HasSubstr("for 4 logical ranks")));
  });
}

}  // namespace
}  // namespace paceline::shm
