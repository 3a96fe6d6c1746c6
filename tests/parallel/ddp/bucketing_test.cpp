#include "parallel/ddp/bucketing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

namespace paceline::ddp {
namespace {

using ::testing::ElementsAre;

TEST(Bucketing, BucketsAreFilledInOrder) {
  const auto floats = [](std::int64_t n) { return torch::zeros({n}); };
  const std::vector<at::Tensor> parameters{floats(100), floats(3), floats(40),
                                           torch::zeros({5}, at::kDouble), floats(17)};
  BucketPlan plan;
  add_buckets(plan, parameters, std::vector<std::size_t>{4, 3, 2, 1, 0},
              {.caps = {4 * 32, 4 * 64}, .dedicated = 4 * 1000});
  ASSERT_EQ(plan.buckets.size(), 4u);
  EXPECT_THAT(plan.buckets[0].parameters, ElementsAre(4)) << "the first is smaller";
  EXPECT_THAT(plan.buckets[1].parameters, ElementsAre(3)) << "of a type of its own";
  EXPECT_THAT(plan.buckets[2].parameters, ElementsAre(2, 1));
  EXPECT_THAT(plan.buckets[3].parameters, ElementsAre(0)) << "larger than a bucket";
  EXPECT_EQ(plan.places[1].offset, 48) << "on a cache line";
  EXPECT_EQ(plan.buckets[2].count, 64);
}

TEST(Bucketing, LargeGradientsHaveBucketsOfTheirOwn) {
  const auto floats = [](std::int64_t n) { return torch::zeros({n}); };
  const std::vector<at::Tensor> parameters{floats(7), floats(1001), floats(8), floats(1000)};
  BucketPlan plan;
  add_buckets(plan, parameters, std::vector<std::size_t>{3, 2, 1, 0},
              {.caps = {4 * 64}, .dedicated = 4 * 1000});
  ASSERT_EQ(plan.buckets.size(), 3u);
  EXPECT_THAT(plan.buckets[0].parameters, ElementsAre(3));
  EXPECT_THAT(plan.buckets[1].parameters, ElementsAre(2, 0)) << "a large one between them";
  EXPECT_THAT(plan.buckets[2].parameters, ElementsAre(1));
  EXPECT_TRUE(plan.buckets[2].dedicated);
  EXPECT_EQ(plan.buckets[2].count, 1001) << "there is nothing to align";
}

TEST(Bucketing, BucketsEndWithTriggers) {
  const auto floats = [](std::int64_t n) { return torch::zeros({n}); };
  const std::vector<at::Tensor> parameters{floats(7), torch::zeros({5}, at::kDouble), floats(1000),
                                           floats(8), floats(9)};
  BucketPlan plan;
  add_buckets(
      plan, parameters, std::vector<std::size_t>{4, 3, 2, 1, 0},
      {.caps = {1 << 20}, .dedicated = 4 * 1000, .ends = {false, false, true, true, false}});
  ASSERT_EQ(plan.buckets.size(), 4u);
  EXPECT_THAT(plan.buckets[0].parameters, ElementsAre(4, 3));
  EXPECT_THAT(plan.buckets[1].parameters, ElementsAre(2));
  EXPECT_THAT(plan.buckets[2].parameters, ElementsAre(1)) << "of a type of its own";
  EXPECT_THAT(plan.buckets[3].parameters, ElementsAre(0));
}

}  // namespace
}  // namespace paceline::ddp
