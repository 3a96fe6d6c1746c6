#include <gmock/gmock.h>
#include <zlib.h>

#include <paceline/distributed.h>
#include <paceline/error.h>
#include <paceline/sampler.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <vector>

namespace paceline::data {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

struct Expected {
  std::int64_t size;
  int replicas;
  int rank;
  bool shuffle;
  std::uint64_t seed;
  bool drop_last;
  std::int64_t epoch;
  std::size_t count;
  std::uint32_t checksum;
  std::vector<std::int64_t> first;
};

const std::vector<Expected> kExpected = {
#include "distributed_sampler_expected.inc"
};

TEST(DistributedSampler, YieldsTheIndicesOfPythonsSampler) {
  for (const Expected& expected : kExpected) {
    SCOPED_TRACE(::testing::Message() << expected.size << " samples, rank " << expected.rank << "/"
                                      << expected.replicas << ", epoch " << expected.epoch);
    DistributedSampler sampler(expected.size, {.num_replicas = expected.replicas,
                                               .rank = expected.rank,
                                               .shuffle = expected.shuffle,
                                               .seed = expected.seed,
                                               .drop_last = expected.drop_last});
    sampler.set_epoch(expected.epoch);
    const auto indices = sampler.indices();
    EXPECT_EQ(sampler.size(), static_cast<std::int64_t>(expected.count));
    ASSERT_EQ(indices.size(), expected.count);
    EXPECT_THAT(std::vector(indices.begin(), indices.begin() + std::ssize(expected.first)),
                ElementsAreArray(expected.first));
    EXPECT_EQ(::crc32(0, reinterpret_cast<const Bytef*>(indices.data()),
                      static_cast<uInt>(indices.size() * sizeof(std::int64_t))),
              expected.checksum);
  }
}

// The same share as without an interruption, however the tail is made even.
TEST(DistributedSampler, GoesOnAfterAnyNumberOfSamples) {
  for (const bool drop_last : {false, true}) {
    for (const bool pad : {false, true}) {
      if (drop_last && !pad) continue;
      for (int rank = 0; rank < 3; ++rank) {
        DistributedSampler sampler(
            10, {.num_replicas = 3, .rank = rank, .drop_last = drop_last, .pad = pad});
        sampler.set_epoch(4);
        const auto all = sampler.indices();
        for (std::size_t taken = 0; taken <= all.size() + 1; ++taken) {
          const auto first = all.begin() + static_cast<std::ptrdiff_t>(std::min(taken, all.size()));
          EXPECT_EQ(sampler.indices_from(3 * static_cast<std::int64_t>(taken)),
                    std::vector<std::int64_t>(first, all.end()));
        }
      }
    }
  }
}

TEST(DistributedSampler, WithoutPaddingEachSampleComesExactlyOnce) {
  for (const std::int64_t size : {0, 1, 3, 10, 10000}) {
    for (const int replicas : {1, 2, 3, 7}) {
      for (const bool shuffle : {false, true}) {
        std::vector<std::int64_t> all;
        for (int rank = 0; rank < replicas; ++rank) {
          const DistributedSampler sampler(
              size, {.num_replicas = replicas, .rank = rank, .shuffle = shuffle, .pad = false});
          const auto indices = sampler.indices();
          EXPECT_EQ(sampler.size(), std::ssize(indices));
          all.insert(all.end(), indices.begin(), indices.end());
        }
        std::vector<std::int64_t> once(static_cast<std::size_t>(size));
        std::iota(once.begin(), once.end(), 0);
        std::ranges::sort(all);
        EXPECT_EQ(all, once) << size << " samples on " << replicas << " ranks";
      }
    }
  }
}

TEST(DistributedSampler, AnEmptyDataSetHasNoIndices) {
  EXPECT_THAT(DistributedSampler(0, {.num_replicas = 3, .rank = 1}).indices(), IsEmpty());
}

TEST(DistributedSampler, RejectsInvalidOptions) {
  const auto make = [](std::int64_t size, DistributedSamplerOptions options) {
    return [=] { DistributedSampler(size, options); };
  };
  EXPECT_THAT(make(3, {.num_replicas = 2, .rank = 2}),
              ThrowsMessage<UsageError>(HasSubstr("rank 2 of 2")));
  EXPECT_THAT(make(3, {.num_replicas = 2, .rank = -1}),
              ThrowsMessage<UsageError>(HasSubstr("rank -1 of 2")));
  EXPECT_THAT(make(3, {.num_replicas = 0, .rank = 0}),
              ThrowsMessage<UsageError>(HasSubstr("rank 0 of 0")));
  EXPECT_THAT(make(-1, {.num_replicas = 1, .rank = 0}),
              ThrowsMessage<UsageError>(HasSubstr("dataset_size is -1")));
  EXPECT_THAT(make(3, {.num_replicas = 1, .rank = 0, .drop_last = true, .pad = false}),
              ThrowsMessage<UsageError>(HasSubstr("set one of them only")));
}

TEST(DistributedSampler, SeedAndEpochMayWrapAround) {
  DistributedSampler sampler(
      5, {.num_replicas = 1, .rank = 0, .seed = std::numeric_limits<std::uint64_t>::max()});
  sampler.set_epoch(1);
  EXPECT_EQ(sampler.indices(), DistributedSampler(5, {.num_replicas = 1, .rank = 0}).indices());
}

struct Shared : SequentialSampler {
  using SequentialSampler::SequentialSampler;
  std::int64_t num_replicas() const override { return 3; }
};

TEST(Sampler, OfItsOwnKindGoesOnWithTheSameNumberOfRanks) {
  EXPECT_THAT(Shared(4).indices_from(6), ElementsAre(2, 3));
  EXPECT_THAT(Shared(4).indices_from(30), IsEmpty());
  EXPECT_THAT([] { std::ignore = Shared(4).indices_from(4); },
              ThrowsMessage<UsageError>(HasSubstr("cannot go on after 4 samples with 3 ranks")));
}

TEST(SequentialSampler, CountsUpwards) {
  EXPECT_THAT(SequentialSampler(4).indices(), ElementsAre(0, 1, 2, 3));
  EXPECT_THROW(SequentialSampler(-1), UsageError);
}

struct ExpectedOrder {
  char kind;  // random, subset or weighted
  std::int64_t size;
  bool replacement;
  std::int64_t num_samples;
  std::vector<double> weights;
  std::uint64_t seed;
  std::int64_t epoch;
  std::vector<std::int64_t> indices;
};

const std::vector<ExpectedOrder> kExpectedOrders = {
#include "random_sampler_expected.inc"
};

TEST(RandomSamplers, YieldTheIndicesOfPythons) {
  for (const ExpectedOrder& expected : kExpectedOrders) {
    std::unique_ptr<Sampler> sampler;
    if (expected.kind == 'r') {
      sampler = std::make_unique<RandomSampler>(
          expected.size, RandomSamplerOptions{.replacement = expected.replacement,
                                              .num_samples = expected.num_samples,
                                              .seed = expected.seed});
    } else if (expected.kind == 's') {
      std::vector<std::int64_t> subset(static_cast<std::size_t>(expected.size));
      std::iota(subset.begin(), subset.end(), 30);
      sampler = std::make_unique<SubsetRandomSampler>(subset, expected.seed);
    } else {
      sampler = std::make_unique<WeightedRandomSampler>(expected.weights, expected.num_samples,
                                                        expected.replacement, expected.seed);
    }
    sampler->set_epoch(expected.epoch);
    EXPECT_EQ(sampler->size(), expected.num_samples);
    EXPECT_EQ(sampler->indices(), expected.indices) << expected.kind << expected.size;
  }
}

TEST(RandomSamplers, RejectInvalidOptions) {
  const auto says = [](const char* text) { return ThrowsMessage<UsageError>(HasSubstr(text)); };
  EXPECT_THAT([] { RandomSampler(3, {.num_samples = -1}); }, says("num_samples is -1"));
  EXPECT_THAT([] { RandomSampler(0, {.num_samples = 2}); }, says("is 2, of a data set of 0"));
  EXPECT_THAT([] { WeightedRandomSampler({1, -1}, 1); }, says("weight 1 is -1"));
  EXPECT_THAT([] { WeightedRandomSampler({std::nan("")}, 1); }, says("weight 0 is nan"));
  EXPECT_THAT([] { WeightedRandomSampler({0, 0}, 1); }, says("0 of 2 weights are above 0"));
  EXPECT_THAT(
      [] {
        WeightedRandomSampler({1, 0}, 2, false);
      },
      says("num_samples is 2 without replacement; 1 of 2 weights"));
  EXPECT_THAT(WeightedRandomSampler({}, 0).indices(), IsEmpty());
}

TEST(DistributedSampler, SharesOutTheOrderOfAnotherSampler) {
  const WeightedRandomSampler whole({1, 2, 3, 4, 5}, 7, true, 3);
  for (const std::int64_t epoch : {0, 2}) {
    WeightedRandomSampler order = whole;
    order.set_epoch(epoch);
    std::vector<std::int64_t> dealt(9);
    for (int rank = 0; rank < 3; ++rank) {
      DistributedSampler sampler(whole, {.num_replicas = 3, .rank = rank});
      sampler.set_epoch(epoch);
      ASSERT_EQ(sampler.size(), 3);
      const auto own = sampler.indices();
      for (std::size_t i = 0; i < own.size(); ++i)
        dealt[3 * i + static_cast<std::size_t>(rank)] = own[i];
    }
    auto expected = order.indices();
    expected.insert(expected.end(), expected.begin(), expected.begin() + 2);  // made even
    EXPECT_EQ(dealt, expected);
  }
  for (const DistributedSamplerOptions& options :
       {DistributedSamplerOptions{.num_replicas = 1, .rank = 0, .shuffle = true},
        DistributedSamplerOptions{.num_replicas = 1, .rank = 0, .seed = 1}}) {
    EXPECT_THAT([&] { DistributedSampler(whole, options); },
                ThrowsMessage<UsageError>(HasSubstr("the sampler chooses the order")));
  }
}

TEST(RandomSampler, HasAnOrderPerSeedAndEpoch) {
  RandomSampler sampler(60, 5);
  const auto first = sampler.indices();
  EXPECT_EQ(first, RandomSampler(60, 5).indices());
  sampler.set_epoch(2);
  const auto third = sampler.indices();
  EXPECT_NE(first, third);
  EXPECT_EQ(third, RandomSampler(60, 7).indices());
  EXPECT_THAT(third, ::testing::UnorderedElementsAreArray(first));
  EXPECT_THROW(RandomSampler(-1), UsageError);
}

}  // namespace
}  // namespace paceline::data
