#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <iterator>
#include <latch>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <paceline/error.h>

#include "shm/buckets/bucket_reducer.h"
#include "support/bucket_steps.h"
#include "support/cases.h"
#include "support/skipped_bucket.h"
#include "support/thread_ranks.h"

namespace paceline::shm {
namespace {

using test::bucket_name;
using test::fill_bucket;
using test::kBuckets;
using test::run_step;
using test::run_thread_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

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
    reducer.abort_step();
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
      EXPECT_THAT([&] { reducer.abort_step(); }, is_named);
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
      EXPECT_THAT(error.what(), HasSubstr("(ranks 0 and 2: 1; rank 1: 2)"));
      EXPECT_THAT(error.ranks(), ::testing::ElementsAre(1));  // whoever notices first
    }
  });
}

// The failure record holds 3 KiB of text.
TEST(BucketReducer, TheAdviceOfALargeJobFitsIntoItsFailure) {
  for (const std::uint32_t divisor : {1U, 2U, 1000U}) {
    std::vector<StepSummary> all(kMaxWorldSize);
    for (std::uint32_t rank = 0; rank < all.size(); ++rank) all[rank].forwards = rank / divisor;
    const Disagreement disagreement = compare_forwards(all, {});
    EXPECT_LT(disagreement.text.size(), std::size_t{2048});
    EXPECT_THAT(disagreement.text, HasSubstr("Average::samples"));
    if (divisor != 1000) continue;
    EXPECT_THAT(disagreement.text, HasSubstr("(ranks 0-999: 0; ranks 1000-1023: 1)"));
    EXPECT_EQ(disagreement.ranks.count(), 24);
  }
}

TEST(BucketReducer, CountsOfMostRanksAreListedFirst) {
  std::vector<StepSummary> all(12);
  for (std::uint32_t rank = 0; rank < all.size(); ++rank) all[rank].forwards = 10 + rank;
  all[3].forwards = all[11].forwards = 9;
  EXPECT_THAT(compare_forwards(all, {}).text,
              AllOf(HasSubstr("(ranks 3 and 11: 9; "), HasSubstr("; the others: other counts)")));
}

TEST(BucketReducer, ALongFailureHasTheSameTextOnAllRanks) {
  std::vector<std::string> texts(3);
  run_thread_ranks(3, [&](auto region) {
    try {  // all of it: a slow rank meets the failure while it constructs its reducer
      Group group(region);
      BucketReducer reducer(group, kBuckets, bucket_name);
      reducer.begin_step({.forwards = 1});
      if (region->rank() == 1) reducer.fail(std::string(10000, 'x'));
      for (std::size_t bucket = 0; bucket < 3; ++bucket) reducer.publish(bucket);
      reducer.finish();
    } catch (const Mismatch& error) {
      texts[static_cast<std::size_t>(region->rank())] = error.what();
    }
  });
  EXPECT_EQ(texts[0], std::string(3072, 'x'));
  EXPECT_THAT(texts, ::testing::Each(texts[0]));
}

using BucketReducerRanksUpTo5 = test::SizeTest;
INSTANTIATE_TEST_SUITE_P(, BucketReducerRanksUpTo5, ::testing::Values(2, 3, 5), test::CaseName());

TEST_P(BucketReducerRanksUpTo5, NamesParametersFrozenOnSomeRanks) {
  const int size = GetParam();
  run_thread_ranks(size, [](auto region) {
    Group group(region);
    BucketReducer reducer(group, kBuckets, bucket_name, {.parameters = {"a", "b", "c"}});
    const auto run = [&](std::uint32_t step, std::vector<std::uint8_t> frozen) {
      reducer.begin_step({.forwards = step, .frozen = fingerprint(frozen)}, {}, frozen);
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

TEST(BucketReducer, RejectsWeightsWithASumOfZero) {
  run_thread_ranks(2, [](auto region) {
    Group group(region);
    BucketReducer reducer(group, kBuckets, bucket_name);
    const double weight[] = {0};
    reducer.begin_step({.forwards = 1}, weight);
    for (std::size_t bucket = 0; bucket < 3; ++bucket) reducer.publish(bucket);
    EXPECT_THAT([&] { reducer.finish(); },
                ThrowsMessage<Mismatch>(HasSubstr("weights add up to 0")));
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
        ThrowsMessage<Mismatch>(HasSubstr("rank 1 skipped bucket 0 (layer0)")));
  });
}

// Rank 1 does not wait for the bucket that it skips, and comes to the next step first.
TEST(BucketReducer, SkippingABucketThatASlowerRankUsesIsAMismatch) {
  for (const bool skips_again : {true, false}) {
    std::atomic<bool> ahead = false;
    run_thread_ranks(2, [&](auto region) {
      Group group(region);
      BucketReducer reducer(group, kBuckets, bucket_name);
      const auto steps = [&] {
        test::skip_a_bucket_that_others_use(reducer, region->rank(), std::size(kBuckets),
                                            skips_again, ahead);
      };
      EXPECT_THAT(steps, ThrowsMessage<Mismatch>(HasSubstr(
                             "in step 2 of group test rank 1 skipped bucket 0 (layer0)")));
    });
  }
}

TEST(BucketReducer, SkippingAllBucketsWaitsForTheOtherRanks) {
  run_thread_ranks(2, [](auto region) {
    Group group(region);
    BucketReducer reducer(group, kBuckets, bucket_name);
    for (std::uint32_t step = 1; step <= 3; ++step) {
      reducer.begin_step({.forwards = step});
      for (std::size_t bucket = 0; bucket < 3; ++bucket) reducer.skip(bucket);
      reducer.finish();
    }
    reducer.begin_step({.forwards = 4});
    for (std::size_t bucket = 0; bucket < 3; ++bucket) {
      region->rank() == 0 ? reducer.skip(bucket) : reducer.publish(bucket);
    }
    EXPECT_THAT([&] { reducer.finish(); }, ThrowsMessage<Mismatch>(HasSubstr("rank 0 skipped")));
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

// Rank 1 runs the backwards of two models in the other order.
TEST(BucketReducer, DistinguishesOrdersOfBackwardsFromALateRank) {
  run_thread_ranks(3, [](auto region) {
    Group group(region);
    BucketReducer first(group, kBuckets, bucket_name);
    BucketReducer second(group, kBuckets, bucket_name);
    std::mt19937 random(1);
    try {
      run_step(region->rank() == 1 ? second : first, *region, 1, random);
      ADD_FAILURE() << "no error";
    } catch (const Mismatch& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr(" waits in the backward of another model, and "),
                                      HasSubstr(" in backward, step 1 of group test, bucket "),
                                      HasSubstr("in the same order on all ranks")));
      EXPECT_THAT(error.ranks(), ::testing::ElementsAre(1));
    }
  });
}

// As on an accelerator: the thread that calls backward waits for the one that runs it.
TEST(BucketReducer, DistinguishesThemIfAThreadStepsForAnother) {
  run_thread_ranks(3, [](auto region) {
    Group group(region);
    BucketReducer reducer(group, kBuckets, bucket_name, {.notes_thread = false});
    std::mt19937 random(1);
    std::exception_ptr failure;
    const auto step_elsewhere = [&](std::size_t step) {
      reducer.note_this_thread();
      std::thread([&] {
        try {
          run_step(reducer, *region, step, random);
        } catch (const Mismatch&) {
          failure = std::current_exception();
        }
      }).join();
      if (failure) std::rethrow_exception(failure);
    };
    step_elsewhere(1);
    EXPECT_THAT(
        [&] {
          if (region->rank() != 1) step_elsewhere(2);
          group.barrier();
        },
        ThrowsMessage<Mismatch>(HasSubstr("rank 1 waits for rank ")));
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
