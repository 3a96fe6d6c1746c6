#include "top/rank_window.h"

#include <gmock/gmock.h>

#include <cmath>

namespace paceline::top {
namespace {

using ::testing::SizeIs;

Clock::time_point at_ms(int milliseconds) {
  return Clock::time_point(std::chrono::hours(1) + std::chrono::milliseconds(milliseconds));
}

// A step of 10 ms, half of it forward, with 32 samples.
LiveRecords records_of_step(int number) {
  const int begin = 10 * number;
  const auto span = [&](trace::Kind kind, int length) {
    return LiveSpan{{.kind = kind,
                     .model = 0,
                     .step = static_cast<std::uint64_t>(number),
                     .begin = at_ms(begin),
                     .end = at_ms(begin + length)},
                    32.0 * number};
  };
  LiveRecords records;
  records.spans = {span(trace::Kind::forward, 5), span(trace::Kind::step, 10)};
  records.thread = {{.at = at_ms(begin), .cpu = std::int64_t{1000} * number}};
  return records;
}

// Whole steps: 45 ms are in step 4.
TEST(RankWindow, KeepsTheStepsSinceAMoment) {
  RankWindow window;
  for (int step = 0; step < 10; ++step) window.add(records_of_step(step), std::nullopt);
  window.keep_since(at_ms(45), 2, 8);
  const auto trace = window.trace();
  ASSERT_THAT(trace.spans, SizeIs(12));
  EXPECT_EQ(trace.spans[0].step, 4U);
  EXPECT_EQ(trace.thread.front().at, at_ms(40));
  EXPECT_EQ(window.last_step()->step, 9U);
}

TEST(RankWindow, KeepsAtLeastAndAtMostSoManySteps) {
  const auto first_of = [](int steps, int since, std::size_t fewest, std::size_t most) {
    RankWindow window;
    for (int step = 0; step < steps; ++step) window.add(records_of_step(step), std::nullopt);
    window.keep_since(at_ms(since), fewest, most);
    return window.trace().spans.at(0).step;
  };
  EXPECT_EQ(first_of(10, 1000, 3, 8), 7U);
  EXPECT_EQ(first_of(3, 1000, 3, 8), 0U);
  EXPECT_EQ(first_of(10, 0, 3, 8), 2U);
}

TEST(RankWindow, CountsStepsAndSamples) {
  RankWindow window;
  window.add(records_of_step(0), std::nullopt);
  EXPECT_FALSE(window.rate(0));
  for (int step = 1; step < 10; ++step) window.add(records_of_step(step), std::nullopt);
  EXPECT_FALSE(window.rate(1));
  EXPECT_NEAR(window.rate(0)->steps, 100, 1e-9);
  EXPECT_NEAR(window.rate(0)->samples, 3200, 1e-9);
  LiveRecords unknown = records_of_step(10);
  unknown.spans[1].samples = std::nan("");
  window.add(unknown, std::nullopt);
  EXPECT_TRUE(std::isnan(window.rate(0)->samples));
}

TEST(RankWindow, NoticesBucketsThatAreNotDescribed) {
  RankWindow window;
  LiveRecords records = records_of_step(0);
  records.spans[0].span.kind = trace::Kind::bucket;
  records.spans[0].span.bucket = 3;
  window.add(records, std::nullopt);
  EXPECT_TRUE(window.lacks_buckets());
  records = {};
  records.buckets[{0, 3}] = {1234, "fc.weight"};
  window.add(records, std::nullopt);
  EXPECT_FALSE(window.lacks_buckets());
}

// A rank that never ends a step is not kept for ever.
TEST(RankWindow, IsBounded) {
  RankWindow window;
  LiveRecords records;
  for (int i = 0; i < 100'000; ++i) records.spans.push_back(records_of_step(i).spans[0]);
  for (int i = 0; i < 5; ++i) window.add(records, std::nullopt);
  EXPECT_LE(window.trace().spans.size(), 300'000U);
}

}  // namespace
}  // namespace paceline::top
