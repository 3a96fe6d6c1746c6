#include "distributed/local_bucket_reducer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>

#include <paceline/error.h>

#include "support/torch_ranks.h"

namespace paceline::distributed {
namespace {

using test::expect_torch_ranks;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

LocalBucketReducer make(std::uint32_t steps = 0) {
  const BucketReducer::Bucket bucket{
      .count = 4, .type = at::kHalf, .device = at::kCPU, .op = BucketReducer::Op::average};
  return LocalBucketReducer(ProcessGroup(),
                            BucketReducer::Options{.buckets = {bucket, bucket}, .steps = steps});
}

TEST(LocalBucketReducer, LeavesBucketsAsTheyAre) {
  expect_torch_ranks(1, "paceline", [](int, int) {
    LocalBucketReducer reducer = make(7);
    reducer.begin_step({}, std::array{3.0}, {});
    EXPECT_EQ(reducer.steps(), 8U);
    const at::Tensor tensor = reducer.tensor(1);
    EXPECT_EQ(tensor.scalar_type(), at::kHalf);
    tensor.fill_(5);
    reducer.publish(1);
    EXPECT_TRUE(reducer.is_reduced(1));
    EXPECT_FALSE(reducer.is_reduced(0));
    reducer.skip(0);
    reducer.finish();
    EXPECT_FALSE(reducer.in_step());
    EXPECT_EQ(reducer.share(), 1);
    EXPECT_TRUE(reducer.tensor(1).eq(5).all().item<bool>());
    EXPECT_EQ(reducer.tensor(1).data_ptr(), tensor.data_ptr());
  });
}

TEST(LocalBucketReducer, AbortsAStepOnce) {
  expect_torch_ranks(1, "paceline", [](int, int) {
    LocalBucketReducer reducer = make();
    EXPECT_FALSE(reducer.abort_step());
    reducer.begin_step({}, {}, {});
    EXPECT_TRUE(reducer.abort_step());
    EXPECT_FALSE(reducer.abort_step());
  });
}

TEST(LocalBucketReducer, ThrowsWhatTheOthersThrow) {
  expect_torch_ranks(1, "paceline", [](int, int) {
    LocalBucketReducer reducer = make();
    EXPECT_THAT([&] { reducer.begin_step({}, std::array{0.0}, {}); },
                ThrowsMessage<Mismatch>(HasSubstr("weights add up to 0")));
    EXPECT_THAT([&] { reducer.fail("no such parameter"); },
                ThrowsMessage<Mismatch>("no such parameter"));
    EXPECT_THAT([&] { reducer.time_out("too late"); }, ThrowsMessage<Timeout>("too late"));
    destroy_process_group();
    EXPECT_THROW(reducer.begin_step({}, {}, {}), UsageError);
  });
}

}  // namespace
}  // namespace paceline::distributed
