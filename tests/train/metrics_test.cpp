#include <paceline/metrics.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <paceline/collectives.h>
#include <paceline/error.h>

#include "support/torch_ranks.h"
#include "support/worlds.h"
#include "train/exact_sum.h"

namespace paceline {
namespace {

using test::expect_torch_ranks;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

__extension__ typedef __int128 Int128;

class ExactSumOfIntegers : public ::testing::TestWithParam<unsigned> {};
INSTANTIATE_TEST_SUITE_P(, ExactSumOfIntegers, ::testing::Range(0U, 20U));

TEST_P(ExactSumOfIntegers, IsRoundedOnce) {
  std::mt19937_64 random(GetParam());
  std::vector<double> partials;
  Int128 expected = 0;
  for (int i = 0; i < 1000; ++i) {
    // Below 2^117, so that the sum is below 2^127.
    const auto mantissa = static_cast<std::int64_t>(random() >> 11);
    const auto exponent = static_cast<int>(random() % 64);
    const bool is_negative = random() % 2 == 0;
    const double value = std::ldexp(static_cast<double>(mantissa), exponent);
    train::add_exactly(partials, is_negative ? -value : value);
    const Int128 exact = static_cast<Int128>(mantissa) << exponent;
    expected += is_negative ? -exact : exact;
  }
  EXPECT_EQ(train::round_sum(partials), static_cast<double>(expected));
}

TEST(ExactSum, RoundsOnce) {
  const auto sum = [](const std::vector<double>& values) {
    std::vector<double> partials;
    for (const double value : values) train::add_exactly(partials, value);
    return train::round_sum(partials);
  };
  EXPECT_EQ(sum({}), 0);
  EXPECT_EQ(sum({1e100, 1, -1e100}), 1);
  EXPECT_EQ(sum({1, 0x1p-53, 0x1p-53}), 1 + 0x1p-52);
  EXPECT_EQ(sum({1, 0x1p-53, 0x1p-106}), 1 + 0x1p-52) << "above half";
  EXPECT_EQ(sum({1, 0x1p-53, -0x1p-106}), 1) << "below half";
  EXPECT_EQ(sum({1, INFINITY, 2}), INFINITY);
  EXPECT_EQ(sum({1e308, 1e308, -1e308}), INFINITY);
  EXPECT_TRUE(std::isnan(sum({INFINITY, 1, -INFINITY})));
  EXPECT_TRUE(std::isnan(sum({1, NAN, 1})));
}

using MetricsWorlds = test::WorldTest;
INSTANTIATE_TEST_SUITE_P(, MetricsWorlds, test::worlds(), test::CaseName());

// Of one process that has all samples.
TEST_P(MetricsWorlds, AreThoseOfOneProcess) {
  expect_torch_ranks(GetParam().size, GetParam().backend, [](int rank, int size) {
    constexpr int kSamples = 23;
    torch::manual_seed(5);
    const auto losses = (torch::randn({kSamples}, torch::kDouble) * 0x1p60).floor();
    const auto targets = torch::randint(3, {kSamples}, torch::kLong);
    const auto predictions = torch::randint(3, {kSamples}, torch::kLong);
    Metrics own;
    for (int i = 0; i < kSamples; ++i) {
      if (i % size != rank) continue;
      own.add("loss", losses[i].item<double>());
      own.add_confusion("classes", predictions.slice(0, i, i + 1), targets.slice(0, i, i + 1), 3);
      own.add("of rank " + std::to_string(i % size), rank, 2);
    }
    own.add("none", 7, 0);
    const auto values = own.reduce();
    // The same bits, however the samples are shared: 128 bits hold their sum.
    Int128 sum = 0;
    for (int i = 0; i < kSamples; ++i) sum += static_cast<Int128>(losses[i].item<double>());
    EXPECT_EQ(values.mean("loss"), static_cast<double>(sum) / kSamples);
    EXPECT_THAT([&] { values.mean("los"); },
                ThrowsMessage<UsageError>(HasSubstr("no mean 'los', but loss, none")));
    EXPECT_TRUE(std::isnan(values.means.at("none")));
    for (int other = 0; other < std::min(size, kSamples); ++other) {
      EXPECT_EQ(values.means.at("of rank " + std::to_string(other)), other);
    }
    const at::Tensor confusion = values.confusion("classes", 3);
    for (int target = 0; target < 3; ++target) {
      for (int prediction = 0; prediction < 3; ++prediction) {
        EXPECT_EQ(confusion[target][prediction].item<std::int64_t>(),
                  ((targets == target) & (predictions == prediction)).sum().item<std::int64_t>());
      }
    }
    EXPECT_THAT([&] { values.confusion("class", 3); },
                ThrowsMessage<UsageError>(HasSubstr("no confusion 'class', but classes")));
    const auto nothing = own.reduce();
    EXPECT_THAT(nothing.means, IsEmpty()) << "they begin anew";
    EXPECT_TRUE(nothing.confusion("classes", 3).equal(torch::zeros({3, 3}, torch::kLong)));
  });
}

TEST(Metrics, SayThatAllRanksReduceThem) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    const auto reduce = [&] {
      if (rank == 0) static_cast<void>(Metrics().reduce());
      if (rank == 1) barrier();
    };
    EXPECT_THAT(reduce,
                ThrowsMessage<Mismatch>(
                    AllOf(HasSubstr("barrier"),
                          rank == 0 ? HasSubstr("Metrics was adding up; call reduce() on all ranks")
                                    : HasSubstr("all_gather"))));
  });
}

TEST(Metrics, RefuseWhatTheyCannotCount) {
  expect_torch_ranks(2, "paceline", [](int rank, int) {
    Metrics metrics;
    EXPECT_THAT([&] { metrics.add("loss", 1.0, -1); },
                ThrowsMessage<UsageError>(HasSubstr("'loss' has a count of -1")));
    EXPECT_THAT([&] { metrics.add("loss", torch::ones({2})); },
                ThrowsMessage<UsageError>(HasSubstr("must have one element")));
    const auto classes = torch::tensor({0, 2});
    EXPECT_THAT([&] { metrics.add_confusion("c", classes, classes, 2); },
                ThrowsMessage<UsageError>(HasSubstr("from 0 to classes - 1 = 1")));
    EXPECT_THAT([&] { metrics.add_confusion("c", classes, torch::tensor({0}), 3); },
                ThrowsMessage<UsageError>(HasSubstr("of one shape")));
    EXPECT_THAT([&] { metrics.add_confusion("c", classes.to(torch::kFloat), classes, 3); },
                ThrowsMessage<UsageError>(HasSubstr("integers")));
    if (rank == 0) metrics.add("many", 0.5, std::numeric_limits<std::int64_t>::max());
    if (rank == 0) {
      EXPECT_THAT([&] { metrics.add("many", 0.5, 1); },
                  ThrowsMessage<UsageError>(HasSubstr("the count of 'many' does not fit")));
    }
    EXPECT_EQ(metrics.reduce().mean("many"), 0.5);
    metrics.add("many", 0.5, std::numeric_limits<std::int64_t>::max());
    EXPECT_THAT([&] { static_cast<void>(metrics.reduce()); },
                ThrowsMessage<UsageError>(HasSubstr("the count of 'many' does not fit")));
    metrics.add_confusion("c", classes, classes, 3 + rank);
    EXPECT_THAT([&] { metrics.add_confusion("c", classes, classes, 5); },
                ThrowsMessage<UsageError>(HasSubstr("5 classes now")));
    EXPECT_THAT([&] { static_cast<void>(metrics.reduce()); },
                ThrowsMessage<UsageError>(HasSubstr("'c' has 4 classes on rank 1")));
  });
}

}  // namespace
}  // namespace paceline
