#include "parallel/ddp/usage_tracker.h"

#include <gtest/gtest.h>

namespace paceline::ddp {
namespace {

using Flags = UsageTracker::Flags;

const DdpOptions kFindsUnused{.find_unused_parameters = true};
const DdpOptions kStatic{.static_graph = true};
const DdpOptions kSkipsUnused{.find_unused_parameters = true,
                              .skip_all_reduce_unused_params = true};

TEST(UsageTracker, OptionsSayWhatMayMissAndWhatIsExchanged) {
  const auto expect = [](const DdpOptions& options, bool may_miss, bool exchanges) {
    const UsageTracker usage(1, options);
    EXPECT_EQ(usage.may_miss(), may_miss);
    EXPECT_EQ(usage.needs_exchange(), exchanges);
  };
  expect({}, false, false);
  expect(kFindsUnused, true, true);
  expect(kStatic, true, true);
  expect(kSkipsUnused, true, false);
}

TEST(UsageTracker, StaticGraphExchangesUsageInItsFirstStepOnly) {
  UsageTracker usage(2, kStatic);
  usage.note(0);
  usage.set_used(Flags{true, false}, usage.used_locally());
  usage.end_step();
  EXPECT_FALSE(usage.may_miss());
  EXPECT_FALSE(usage.needs_exchange());
  EXPECT_TRUE(usage.is_ever_used(0));
  EXPECT_FALSE(usage.is_ever_used(1));
  usage.set_used({}, {true, true});
  EXPECT_EQ(usage.used(), (Flags{true, false}));
}

TEST(UsageTracker, WhatRanksExchangeDecides) {
  UsageTracker usage(2, kFindsUnused);
  usage.note(0);
  usage.set_used(Flags{true, true}, usage.used_locally());
  EXPECT_TRUE(usage.used(1));
  usage.set_used({}, usage.used_locally());
  EXPECT_FALSE(usage.used(1));
}

TEST(UsageTracker, NotesLastUntilAStepIsFinishedOrForgotten) {
  UsageTracker usage(2, kFindsUnused);
  usage.note(1);
  usage.set_used({}, usage.used_locally());
  EXPECT_EQ(usage.used_locally(), (Flags{false, true}));
  usage.end_step();
  EXPECT_EQ(usage.used_locally(), (Flags{false, false}));
  EXPECT_TRUE(usage.used(1));
  usage.note(0);
  usage.forget();
  EXPECT_EQ(usage.used_locally(), (Flags{false, false}));
}

TEST(UsageTracker, FindsBucketsWithoutAUsedParameter) {
  BucketPlan plan;
  plan.buckets = {{1, at::kFloat, at::kCPU, {0, 2}}, {1, at::kFloat, at::kCPU, {1}}};
  UsageTracker skips(3, kSkipsUnused);
  skips.note(2);
  EXPECT_EQ(skips.unused_buckets(plan), (Flags{false, true}));
  EXPECT_TRUE(UsageTracker(3, kFindsUnused).unused_buckets(plan).empty());
}

}  // namespace
}  // namespace paceline::ddp
