#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <latch>
#include <optional>
#include <random>
#include <vector>

#include <paceline/error.h>

#include "shm/buckets/bucket_reducer.h"
#include "support/cases.h"
#include "support/thread_ranks.h"

namespace paceline::shm {
namespace {

using test::kWorldSizes;
using test::run_thread_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

std::string bucket_name(std::size_t bucket) {
  return "layer" + std::to_string(bucket);
}

constexpr BucketReducer::Bucket kBuckets[] = {{5, DataType::float32, ReduceOp::avg},
                                              {40000, DataType::float64, ReduceOp::sum},
                                              {64, DataType::int64, ReduceOp::max}};

double value_of(int rank, std::size_t step, std::size_t bucket) {
  return static_cast<double>(10 * rank + static_cast<int>(step % 7) + static_cast<int>(bucket));
}

template <typename T>
void fill(const BucketReducer& reducer, std::size_t bucket, double value) {
  auto* const data = reinterpret_cast<T*>(reducer.data(bucket).get());
  std::fill_n(data, kBuckets[bucket].count, static_cast<T>(value));
}
template <typename T>
void expect(const BucketReducer& reducer, std::size_t bucket, double value) {
  const auto* const data = reinterpret_cast<const T*>(reducer.data(bucket).get());
  for (std::size_t i = 0; i < kBuckets[bucket].count; ++i) {
    ASSERT_DOUBLE_EQ(static_cast<double>(data[i]), value) << "bucket " << bucket << " at " << i;
  }
}

void fill_bucket(const BucketReducer& reducer, std::size_t bucket, double value) {
  if (bucket == 0) fill<float>(reducer, bucket, value);
  if (bucket == 1) fill<double>(reducer, bucket, value);
  if (bucket == 2) fill<std::int64_t>(reducer, bucket, value);
}

void check_step(const BucketReducer& reducer, int size, std::size_t step) {
  double sum[3] = {0, 0, 0};
  for (int rank = 0; rank < size; ++rank) {
    for (std::size_t b = 0; b < 3; ++b) sum[b] += value_of(rank, step, b);
  }
  expect<float>(reducer, 0, static_cast<float>(sum[0]) / static_cast<float>(size));
  expect<double>(reducer, 1, sum[1]);
  expect<std::int64_t>(reducer, 2, value_of(size - 1, step, 2));
}

void run_step(BucketReducer& reducer, const Region& region, std::size_t step,
              std::mt19937& random) {
  std::vector<std::size_t> order{0, 1, 2};
  std::shuffle(order.begin(), order.end(), random);
  reducer.begin_step({.forwards = static_cast<std::uint32_t>(step)});
  for (const std::size_t bucket : order) {
    fill_bucket(reducer, bucket, value_of(region.rank(), step, bucket));
    reducer.publish(bucket);
    if (random() % 2 == 0) reducer.try_progress();
  }
  reducer.finish();
  check_step(reducer, region.size(), step);
}

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
        reducer.abandon_step();
      } else {
        run_step(reducer, *region, step, random);
      }
    }
  });
}

TEST(BucketReducer, NamesARankThatAbortsAndGoesOn) {
  run_thread_ranks(3, [](auto region) {
    Group group(region);
    BucketReducer reducer(group, kBuckets, bucket_name);
    std::mt19937 random(static_cast<unsigned>(region->rank()));
    reducer.begin_step({.forwards = 1});
    fill_bucket(reducer, 0, 1);
    reducer.publish(0);
    if (region->rank() != 1) {
      reducer.publish(1);
      reducer.publish(2);
      try {
        reducer.finish();
        ADD_FAILURE() << "finished without rank 1";
      } catch (const Mismatch& error) {
        EXPECT_THAT(error.ranks(), ::testing::ElementsAre(1));
        EXPECT_THAT(error.what(), HasSubstr("rank 1 aborted step 1 of group test"));
        EXPECT_THAT(error.what(), HasSubstr("(layer"));
      }
    }
    reducer.abandon_step();
    run_step(reducer, *region, 2, random);
  });
}

// Rank 1's backward throws when nothing is left that the others would wait for.
TEST(BucketReducer, AbortingAStepThatOthersFinishedFailsTheGroup) {
  run_thread_ranks(3, [](auto region) {
    Group group(region);
    BucketReducer reducer(group, kBuckets, bucket_name);
    reducer.begin_step({.forwards = 1});
    for (std::size_t bucket = 0; bucket < 3; ++bucket) reducer.publish(bucket);
    group.barrier();
    reducer.try_progress();
    const auto is_named = ThrowsMessage<Mismatch>(
        AllOf(HasSubstr("an exception ended the backward of rank 1 in step 1 of group test"),
              HasSubstr("finished the step")));
    if (region->rank() == 1) {
      EXPECT_THAT([&] { reducer.abandon_step(); }, is_named);
    } else {
      reducer.finish();
      while (!region->failed()) std::this_thread::yield();
    }
    EXPECT_THAT([&] { reducer.begin_step({.forwards = 2}); }, is_named);
  });
}

TEST(BucketReducer, DestructionAbortsTheStep) {
  run_thread_ranks(3, [](auto region) {
    Group group(region);
    std::optional<BucketReducer> reducer(std::in_place, group, kBuckets, bucket_name);
    reducer->begin_step({.forwards = 1});
    reducer->publish(0);
    if (region->rank() == 1) {
      reducer.reset();
    } else {
      reducer->publish(1);
      reducer->publish(2);
      EXPECT_THAT([&] { reducer->finish(); },
                  ThrowsMessage<Mismatch>(HasSubstr("rank 1 aborted step 1 of group test")));
    }
    group.barrier();
  });
}

TEST(BucketReducer, DetectsForwardsWithoutBackwardOnOneRank) {
  run_thread_ranks(3, [](auto region) {
    Group group(region);
    BucketReducer reducer(group, kBuckets, bucket_name);
    reducer.begin_step({.forwards = region->rank() == 1 ? 2U : 1U});
    for (std::size_t bucket = 0; bucket < 3; ++bucket) reducer.publish(bucket);
    try {
      reducer.finish();
      ADD_FAILURE() << "gradients of different batches were averaged";
    } catch (const Mismatch& error) {
      EXPECT_THAT(error.what(), HasSubstr("(rank 0 1, rank 1 2, rank 2 1)"));
      EXPECT_THAT(error.ranks(), ::testing::ElementsAre(1));  // whoever notices first
    }
  });
}

using BucketReducerRanksUpTo5 = test::SizeTest;
INSTANTIATE_TEST_SUITE_P(, BucketReducerRanksUpTo5, ::testing::Values(2, 3, 5), test::CaseName());

TEST_P(BucketReducerRanksUpTo5, NamesParametersFrozenOnSomeRanks) {
  const int size = GetParam();
  run_thread_ranks(size, [](auto region) {
    Group group(region);
    BucketReducer reducer(group, kBuckets, bucket_name, 0, {"a", "b", "c"});
    const auto run = [&](std::uint32_t step, std::vector<std::uint8_t> frozen) {
      reducer.begin_step({.forwards = step, .frozen = fingerprint(frozen)}, 1, frozen);
      for (std::size_t bucket = 0; bucket < 3; ++bucket) reducer.publish(bucket);
      reducer.finish();
    };
    run(1, {0, 0, 0});
    run(2, {0, 1, 0});
    run(3, {0, 0, 0});
    try {
      run(4, {1, 0, region->rank() == 1 ? std::uint8_t{1} : std::uint8_t{0}});
      ADD_FAILURE() << "no error";
    } catch (const Mismatch& error) {
      EXPECT_THAT(error.what(),
                  HasSubstr("in step 4 of group test 1 of 3 parameters are frozen on some ranks "
                            "and trained on others: c is frozen on rank 1. "));
      if (region->size() == 2) {
        EXPECT_THAT(error.ranks(), ::testing::ElementsAre(0, 1));
      } else {
        EXPECT_THAT(error.ranks(), ::testing::ElementsAre(1));
      }
    }
  });
}

TEST_P(BucketReducerRanks, ReportsDifferentNumbersOfModificationsWithoutAnError) {
  const int size = GetParam();
  run_thread_ranks(size, [](auto region) {
    Group group(region);
    BucketReducer reducer(group, kBuckets, bucket_name, 0, {"a"});
    for (std::uint32_t step = 1; step <= 6; ++step) {
      const bool is_last = region->rank() + 1 == region->size();
      const bool differs = is_last && step % 2 == 0;
      const bool has_joined = region->rank() == 0 && step > 4;
      const std::uint8_t frozen[] = {has_joined ? std::uint8_t{1} : std::uint8_t{0}};
      reducer.begin_step({.forwards = step,
                          .frozen = fingerprint(frozen),
                          .modifications = differs ? 7U : 3U,
                          .joined = has_joined ? 1U : 0U},
                         1, frozen);
      for (std::size_t bucket = 0; bucket < 3; ++bucket) reducer.publish(bucket);
      reducer.finish();
      EXPECT_EQ(reducer.modified_apart(), region->size() > 1 && step % 2 == 0 && step <= 4);
    }
  });
}

// Numbers of steps wrap around, and half of them seem to lie ahead of zero.
TEST(BucketReducer, ContinuesAfterAnyNumberOfSteps) {
  for (const std::uint32_t steps : {0x7ffffff0U, 0x80000010U, 0xfffffff0U}) {
    run_thread_ranks(3, [=](auto region) {
      Group group(region);
      BucketReducer reducer(group, kBuckets, bucket_name, steps);
      std::mt19937 random(static_cast<unsigned>(region->rank()));
      for (std::size_t step = 1; step <= 40; ++step) {
        if (step % 5 == 0) {
          reducer.begin_step({.forwards = static_cast<std::uint32_t>(step)});
          reducer.publish(1);
          reducer.abandon_step();
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
      reducer.begin_step({.forwards = static_cast<std::uint32_t>(step)}, weight_of(rank));
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

TEST(BucketReducer, RejectsWeightsWithASumOfZero) {
  run_thread_ranks(2, [](auto region) {
    Group group(region);
    BucketReducer reducer(group, kBuckets, bucket_name);
    reducer.begin_step({.forwards = 1}, 0);
    for (std::size_t bucket = 0; bucket < 3; ++bucket) reducer.publish(bucket);
    EXPECT_THAT([&] { reducer.finish(); },
                ThrowsMessage<Mismatch>(HasSubstr("weights add up to 0")));
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

TEST(BucketReducer, SkippingDifferentBucketsIsAMismatch) {
  run_thread_ranks(3, [](auto region) {
    Group group(region);
    BucketReducer reducer(group, kBuckets, bucket_name);
    // Whatever a rank is doing when another notices.
    EXPECT_THAT(
        [&] {
          reducer.begin_step({.forwards = 1});
          for (std::size_t bucket = 0; bucket < 3; ++bucket) {
            bucket == 0 && region->rank() == 1 ? reducer.skip(bucket) : reducer.publish(bucket);
          }
          reducer.finish();
          group.barrier();
        },
        ThrowsMessage<Mismatch>(HasSubstr("rank 1 had nothing for bucket 0 (layer0)")));
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
    reducer.abandon_step();
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

TEST(BucketReducer, DifferentBucketsAreAMismatch) {
  run_thread_ranks(3, [](auto region) {
    Group group(region);
    const std::span<const BucketReducer::Bucket> all(kBuckets);
    try {
      const BucketReducer reducer(group, all.first(region->rank() == 1 ? 2 : 3), bucket_name);
      ADD_FAILURE() << "no error";
    } catch (const Mismatch& error) {
      EXPECT_THAT(error.what(),
                  HasSubstr("in 3 buckets of 320532 bytes in all on rank 0, and in 2 buckets of "
                            "320020 bytes in all on rank 1: DistributedDataParallel needs the same "
                            "options on every rank"));
      EXPECT_THAT(error.ranks(), ::testing::ElementsAre(1));
    }
  });
}

// Rank 1 has inputs for one step, and goes on to what comes after training.
TEST(BucketReducer, DistinguishesUnevenInputsFromALateRank) {
  run_thread_ranks(3, [](auto region) {
    Group group(region);
    BucketReducer reducer(group, kBuckets, bucket_name);
    std::mt19937 random(1);
    run_step(reducer, *region, 1, random);
    EXPECT_THAT(
        [&] {
          if (region->rank() != 1) run_step(reducer, *region, 2, random);
          group.barrier();
        },
        ThrowsMessage<Mismatch>(AllOf(HasSubstr("rank 1 waits for rank "),
                                      HasSubstr(" in barrier, call 2, while rank "),
                                      HasSubstr(" waits for it in backward, step 2 of group test, "
                                                "bucket "),
                                      HasSubstr("train inside join"))));
  });
}

// Rank 1 has a step less than the others, or one more.
TEST(BucketReducer, BlamesTheMinorityForUnevenInputs) {
  for (const bool has_more : {false, true}) {
    run_thread_ranks(3, [=](auto region) {
      Group group(region);
      BucketReducer reducer(group, kBuckets, bucket_name);
      std::mt19937 random(1);
      run_step(reducer, *region, 1, random);
      try {
        if ((region->rank() == 1) == has_more) run_step(reducer, *region, 2, random);
        group.barrier();
        ADD_FAILURE() << "no error";
      } catch (const Mismatch& error) {
        EXPECT_THAT(error.ranks(), ::testing::ElementsAre(1)) << error.what();
      }
    });
  }
}

TEST(BucketReducer, ARankThatLeavesBeforeTheOthersMayHaveRunOutOfInputs) {
  run_thread_ranks(2, [](auto region) {
    Group group(region);
    BucketReducer reducer(group, kBuckets, bucket_name);
    std::mt19937 random(1);
    run_step(reducer, *region, 1, random);
    if (region->rank() == 1) return region->depart();
    EXPECT_THAT([&] { run_step(reducer, *region, 2, random); },
                ThrowsMessage<PeerLost>(
                    AllOf(HasSubstr("rank 1 has left the group"), HasSubstr("train inside join"))));
  });
}

// Calls on one thread and steps on another may wait for each other.
TEST(BucketReducer, DoesNotTakeCallsOfAnotherThreadForUnevenInputs) {
  run_thread_ranks(2, [](auto region) {
    Group group(region);
    BucketReducer reducer(group, kBuckets, bucket_name);
    std::mt19937 random(static_cast<unsigned>(region->rank()));
    for (std::size_t step = 1; step <= 50; ++step) {
      const std::uint32_t before = region->rings();
      std::thread caller;
      if (region->rank() == 1) {
        caller = std::thread([&] { group.barrier(); });
        region->listen(before);  // until rank 0 is about to wait
      } else {
        region->ring(1);
      }
      run_step(reducer, *region, step, random);
      region->rank() == 1 ? caller.join() : group.barrier();
    }
  });
}

// Rank 0 is a step behind the others when rank 1 fails.
TEST(BucketReducer, TellsWhichStepEachRankFinishedLastAfterAFailure) {
  run_thread_ranks(3, [](auto region) {
    Group group(region);
    BucketReducer reducer(group, kBuckets, bucket_name);
    std::mt19937 random(1);
    for (std::size_t step = 1; step <= 2; ++step) run_step(reducer, *region, step, random);
    reducer.begin_step({.forwards = 3});
    for (std::size_t bucket = 0; bucket < 3; ++bucket) reducer.publish(bucket);
    group.barrier();
    reducer.try_progress();
    if (region->rank() != 0) reducer.finish();
    group.barrier();
    if (region->rank() == 1) region->abort("out of memory");
    while (!region->failed()) std::this_thread::yield();
    EXPECT_EQ(reducer.finished(0), 2u);
    EXPECT_EQ(reducer.finished(1), 3u);
    EXPECT_EQ(reducer.finished(2), 3u);
  });
}

TEST(BucketReducer, NamesAMissingBucketAtTheDeadline) {
  std::latch published(1);
  run_thread_ranks(2, [&](auto region) {
    Group group(region);
    // A reducer takes over the group's timeout when it is made, for which both have to come too.
    if (region->rank() == 0) group.set_timeout(std::chrono::seconds(5));
    BucketReducer reducer(group, kBuckets, bucket_name);
    reducer.begin_step({.forwards = 1});
    if (region->rank() == 1) {
      reducer.publish(2);
      published.count_down();
      while (!region->failed()) std::this_thread::yield();
      return;
    }
    for (const std::size_t bucket : {2u, 0u, 1u}) reducer.publish(bucket);
    published.wait();
    try {
      reducer.finish();
      ADD_FAILURE() << "finished alone";
    } catch (const Timeout& error) {
      EXPECT_THAT(error.ranks(), ::testing::ElementsAre(1));
      EXPECT_STREQ(error.what(),
                   "rank 1 did not arrive within the timeout of 5 s at backward, step 1 of "
                   "group test, "
                   "bucket 0 (layer0); rank 0: it has 3 of 3 buckets ready, 1 (layer1) last; "
                   "rank 1: it has 1 of 3 buckets ready, 2 (layer2) last");
    }
  });
}

}  // namespace
}  // namespace paceline::shm
