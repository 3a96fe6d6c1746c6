#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "shm/buckets/bucket_reducer.h"
#include "support/bucket_steps.h"
#include "support/cases.h"
#include "support/thread_ranks.h"

namespace paceline::shm {
namespace {

using test::bucket_name;
using test::check_step;
using test::expect;
using test::fill_bucket;
using test::kBuckets;
using test::kWorldSizes;
using test::run_step;
using test::run_thread_ranks;
using test::value_of;

using BucketReducerRanks = test::SizeTest;
INSTANTIATE_TEST_SUITE_P(, BucketReducerRanks, ::testing::ValuesIn(kWorldSizes), test::CaseName());

TEST_P(BucketReducerRanks, ReducesBucketsInAnyOrderOnEachRank) {
  const int size = GetParam();
  run_thread_ranks(size, [](auto region) {
    Group group(region);
    BucketReducer reducer(group, kBuckets, bucket_name);
    std::mt19937 random(static_cast<unsigned>(region->rank()));  // another order on each rank
    for (std::size_t step = 1; step <= 50; ++step) run_step(reducer, *region, step, random);
  });
}

TEST(BucketReducer, IsIndependentOfOtherReducersAndCalls) {
  run_thread_ranks(3, [](auto region) {
    Group group(region);
    BucketReducer first(group, kBuckets, bucket_name);
    BucketReducer second(group, kBuckets, bucket_name);
    std::mt19937 random(static_cast<unsigned>(region->rank()));
    for (std::size_t step = 1; step <= 30; ++step) {
      first.begin_step({.forwards = static_cast<std::uint32_t>(step)});
      fill_bucket(first, 0, value_of(region->rank(), step, 0));
      first.publish(0);
      std::int64_t one = 1;
      group.all_reduce(&one, &one, 1, DataType::int64, ReduceOp::sum);
      EXPECT_EQ(one, 3);
      run_step(second, *region, step, random);
      for (const std::size_t bucket : {2u, 1u}) {
        fill_bucket(first, bucket, value_of(region->rank(), step, bucket));
        first.publish(bucket);
      }
      first.finish();
      check_step(first, region->size(), step);
    }
  });
}

TEST(BucketReducer, ManyConstructionsAndDestructionsStayMatched) {
  run_thread_ranks(4, [](auto region) {
    Group group(region);
    std::mt19937 random(static_cast<unsigned>(region->rank()));
    for (int round = 0; round < 20; ++round) {
      BucketReducer reducer(group, kBuckets, bucket_name);
      for (std::size_t step = 1; step <= 3; ++step) run_step(reducer, *region, step, random);
    }
    EXPECT_EQ(region->memory().bytes_in_use(), 0u);
  });
}

TEST_P(BucketReducerRanks, GoesOnAfterAStepThatAllAborted) {
  const int size = GetParam();
  run_thread_ranks(size, [](auto region) {
    Group group(region);
    BucketReducer reducer(group, kBuckets, bucket_name);
    std::mt19937 random(static_cast<unsigned>(region->rank()));
    for (std::size_t step = 1; step <= 30; ++step) {
      if (step % 3 == 0) {
        reducer.begin_step({.forwards = static_cast<std::uint32_t>(step)});
        for (std::size_t bucket = 0; bucket < random() % 3; ++bucket) {
          fill_bucket(reducer, bucket, 1e6);
          reducer.publish(bucket);
          reducer.try_progress();
        }
        reducer.abort_step();
      } else {
        run_step(reducer, *region, step, random);
      }
    }
  });
}

TEST_P(BucketReducerRanks, ReportsDifferentNumbersOfModificationsWithoutAnError) {
  const int size = GetParam();
  run_thread_ranks(size, [](auto region) {
    Group group(region);
    BucketReducer reducer(group, kBuckets, bucket_name, {.parameters = {"a"}});
    for (std::uint32_t step = 1; step <= 6; ++step) {
      const bool is_last = region->rank() + 1 == region->size();
      const bool differs = is_last && step % 2 == 0;
      const bool has_joined = region->rank() == 0 && step > 4;
      const std::uint8_t frozen[] = {has_joined ? std::uint8_t{1} : std::uint8_t{0}};
      reducer.begin_step({.forwards = step,
                          .frozen = fingerprint(frozen),
                          .modifications = differs ? 7U : 3U,
                          .joined = has_joined ? 1U : 0U},
                         {}, frozen);
      for (std::size_t bucket = 0; bucket < 3; ++bucket) reducer.publish(bucket);
      reducer.finish();
      EXPECT_EQ(reducer.modifications_differ(), region->size() > 1 && step % 2 == 0 && step <= 4);
    }
  });
}

// Numbers of steps wrap around, and half of them seem to lie ahead of zero.
TEST(BucketReducer, ContinuesAfterAnyNumberOfSteps) {
  for (const std::uint32_t steps : {0x7ffffff0U, 0x80000010U, 0xfffffff0U}) {
    run_thread_ranks(3, [=](auto region) {
      Group group(region);
      BucketReducer reducer(group, kBuckets, bucket_name, {.steps = steps});
      std::mt19937 random(static_cast<unsigned>(region->rank()));
      for (std::size_t step = 1; step <= 40; ++step) {
        if (step % 5 == 0) {
          reducer.begin_step({.forwards = static_cast<std::uint32_t>(step)});
          reducer.publish(1);
          reducer.abort_step();
        } else if (step % 5 == 1) {
          reducer.begin_step({.forwards = static_cast<std::uint32_t>(step)});
          fill_bucket(reducer, 0, region->rank());
          reducer.skip(0);
          reducer.publish(1);
          reducer.publish(2);
          reducer.finish();
          expect<float>(reducer, 0, region->rank());
        } else {
          run_step(reducer, *region, step, random);
        }
      }
      EXPECT_EQ(reducer.steps(), steps + 40);
    });
  }
}

TEST_P(BucketReducerRanks, AveragesByWeight) {
  const int size = GetParam();
  run_thread_ranks(size, [](auto region) {
    Group group(region);
    BucketReducer reducer(group, kBuckets, bucket_name);
    const int rank = region->rank();
    for (std::size_t step = 1; step <= 6; ++step) {
      // In the third step only the last rank counts, and the others hold garbage.
      const auto weight_of = [&](int of) {
        return step == 3 ? (of + 1 == region->size() ? 0.5 : 0.0) : static_cast<double>(of + 1);
      };
      const double weight[] = {weight_of(rank)};
      reducer.begin_step({.forwards = static_cast<std::uint32_t>(step)}, weight);
      double total = 0;
      double average = 0;
      for (int other = 0; other < region->size(); ++other) {
        total += weight_of(other);
        average += weight_of(other) * value_of(other, step, 0);
      }
      const bool counts = weight_of(rank) > 0;
      fill_bucket(reducer, 0, counts ? value_of(rank, step, 0) : std::nan(""));
      fill_bucket(reducer, 1, 1);
      for (std::size_t bucket = 0; bucket < 3; ++bucket) reducer.publish(bucket);
      reducer.finish();
      const auto* const data = reinterpret_cast<const float*>(reducer.data(0).get());
      for (std::size_t i = 0; i < kBuckets[0].count; ++i) {
        ASSERT_NEAR(data[i], average / total, 1e-5 * average / total);
      }
      expect<double>(reducer, 1, region->size());  // a sum
    }
  });
}

TEST_P(BucketReducerRanks, LeavesSkippedBucketsUnchanged) {
  const int size = GetParam();
  run_thread_ranks(size, [](auto region) {
    Group group(region);
    BucketReducer reducer(group, kBuckets, bucket_name);
    for (std::size_t step = 1; step <= 4; ++step) {
      reducer.begin_step({.forwards = static_cast<std::uint32_t>(step)});
      const std::size_t skipped = step % 2;
      for (std::size_t bucket = 0; bucket < 3; ++bucket) {
        fill_bucket(reducer, bucket, value_of(region->rank(), step, bucket));
        bucket == skipped ? reducer.skip(bucket) : reducer.publish(bucket);
      }
      reducer.finish();
      const double own = value_of(region->rank(), step, skipped);
      if (skipped == 0) expect<float>(reducer, 0, own);
      if (skipped == 1) expect<double>(reducer, 1, own);
      expect<std::int64_t>(reducer, 2, value_of(region->size() - 1, step, 2));
    }
  });
}

TEST_P(BucketReducerRanks, UsesMemoryInPlaceForAStep) {
  const int size = GetParam();
  run_thread_ranks(size, [](auto region) {
    Group group(region);
    BucketReducer reducer(group, kBuckets, bucket_name);
    const std::size_t bytes = kBuckets[1].count * sizeof(double);
    for (std::size_t step = 1; step <= 6; ++step) {
      auto* const memory = static_cast<double*>(region->allocate_or_throw(bytes));
      std::fill_n(memory, kBuckets[1].count, value_of(region->rank(), step, 1));
      reducer.begin_step({.forwards = static_cast<std::uint32_t>(step)});
      for (std::size_t bucket = 0; bucket < 3; ++bucket) fill_bucket(reducer, bucket, -5);
      // On each rank in other steps.
      const bool in_place = (step + static_cast<std::size_t>(region->rank())) % 3 != 0;
      if (in_place) {
        EXPECT_TRUE(reducer.use_in_place(1, memory));
      } else {
        fill_bucket(reducer, 1, value_of(region->rank(), step, 1));
      }
      for (std::size_t bucket = 0; bucket < 3; ++bucket) reducer.publish(bucket);
      reducer.finish();
      double sum = 0;
      for (int rank = 0; rank < region->size(); ++rank) sum += value_of(rank, step, 1);
      if (in_place) {
        for (std::size_t i = 0; i < kBuckets[1].count; ++i) ASSERT_EQ(memory[i], sum);
        expect<double>(reducer, 1, -5);
      } else {
        expect<double>(reducer, 1, sum);
      }
      region->memory().free(memory);
    }
  });
}

TEST(BucketReducer, UsesOnlyWholeBlocksOfItsRegionInPlace) {
  run_thread_ranks(2, [](auto region) {
    Group group(region);
    BucketReducer reducer(group, kBuckets, bucket_name);
    reducer.begin_step({.forwards = 1});
    alignas(kCacheLine) float own[5];
    EXPECT_FALSE(reducer.use_in_place(0, own));
    auto* const block = static_cast<std::byte*>(region->allocate_or_throw(1024));
    EXPECT_FALSE(reducer.use_in_place(0, block + kCacheLine));
    EXPECT_FALSE(reducer.use_in_place(1, block)) << "too small";
    region->memory().free(block);
    EXPECT_FALSE(reducer.use_in_place(0, block)) << "free";
    reducer.abort_step();
  });
}

// Peers may still write to what a rank has published when its reducer goes.
TEST(BucketReducer, DestructionInAStepRetiresMemoryUsedInPlace) {
  run_thread_ranks(2, [](auto region) {
    Group group(region);
    void* const memory = region->allocate_or_throw(64);
    {
      BucketReducer reducer(group, kBuckets, bucket_name);
      reducer.begin_step({.forwards = 1});
      EXPECT_TRUE(reducer.use_in_place(0, memory));
      reducer.publish(0);
    }
    region->memory().free(memory);
    for (int i = 0; i < 100; ++i) EXPECT_NE(region->memory().allocate(64), memory);
    group.barrier();
  });
}

}  // namespace
}  // namespace paceline::shm
