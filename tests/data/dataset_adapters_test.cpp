#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include <paceline/error.h>
#include <paceline/map.h>
#include <paceline/subset.h>
#include <paceline/tensor_dataset.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace paceline::data {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// Squares, and nothing else: neither batches nor copies.
struct Squares {
  explicit Squares(std::int64_t size) : count(size) {}
  Squares(Squares&&) = default;
  std::int64_t size() const { return count; }
  std::int64_t get(std::int64_t i) { return i * i; }
  std::int64_t count;
};

// Random numbers, and 0 as if one had forgotten the generator.
struct Draws {
  std::int64_t size() const { return 4; }
  std::int64_t get(std::int64_t i, at::Generator& generator) const {
    return at::randint(1000, {1}, generator, at::kLong).item<std::int64_t>() * 10 + i;
  }
  std::int64_t get(std::int64_t /*i*/) const { return 0; }
};

std::int64_t draw(at::Generator& generator) {
  return at::randint(1000, {1}, generator, at::kLong).item<std::int64_t>();
}

at::Generator generator_of(std::uint64_t seed) {
  return at::detail::createCPUGenerator(seed);
}

template <typename Dataset>
concept TakesNoGenerator = requires(Dataset& set) {
  set.get(std::int64_t{});
};

TEST(TensorDataset, HasOneRowOfEachTensor) {
  const at::Tensor x = at::arange(12, at::kFloat).view({4, 3});
  const at::Tensor y = at::tensor({7, 8, 9, 10}, at::kLong);
  const TensorDataset set(x, y);
  ASSERT_EQ(set.size(), 4);
  const auto& [row, label] = set.get(2);
  EXPECT_TRUE(row.equal(at::tensor({6.0F, 7.0F, 8.0F})));
  EXPECT_EQ(label.item<std::int64_t>(), 9);
  const auto [rows, labels] = set.get_batch(std::array<std::int64_t, 3>{3, 0, 3});
  EXPECT_TRUE(
      rows.equal(at::tensor({9., 10., 11., 0., 1., 2., 9., 10., 11.}, at::kFloat).view({3, 3})));
  EXPECT_TRUE(labels.equal(at::tensor({10, 7, 10}, at::kLong)));
}

TEST(TensorDataset, TakesAnyNumberOfTensors) {
  const at::Tensor x = at::arange(4, at::kLong);
  const TensorDataset one(x);
  static_assert(std::is_same_v<decltype(one.get(0)), std::tuple<at::Tensor>>);
  EXPECT_EQ(std::get<0>(one.get(3)).item<std::int64_t>(), 3);
  const TensorDataset three(x, x * 2, x * 3);
  const auto [a, b, c] = three.get_batch(std::array<std::int64_t, 1>{2});
  EXPECT_EQ(c.item<std::int64_t>(), 6);
  const TensorDataset copy(three);  // not a data set of a data set
  EXPECT_EQ(copy.tensors()[1].data_ptr(), three.tensors()[1].data_ptr());
}

TEST(TensorDataset, RejectsTensorsThatDoNotMatch) {
  const at::Tensor x = at::zeros({4, 2});
  EXPECT_THAT([&] { TensorDataset(x, at::zeros({3})); },
              ThrowsMessage<UsageError>(HasSubstr("tensor 1 has 3 samples, and tensor 0 has 4")));
  EXPECT_THAT([&] { TensorDataset(x, at::zeros({})); },
              ThrowsMessage<UsageError>(HasSubstr("tensor 1 has no dimension")));
  EXPECT_THAT([&] { TensorDataset(at::Tensor()); },
              ThrowsMessage<UsageError>(HasSubstr("tensor 0")));
}

TEST(TensorDataset, RejectsAnIndexOutOfRange) {
  const TensorDataset set(at::zeros({4}));
  for (const std::int64_t index : {-1, 4}) {
    EXPECT_THAT([&] { static_cast<void>(set.get(index)); },
                ThrowsMessage<UsageError>(HasSubstr("no sample " + std::to_string(index))));
    EXPECT_THAT(
        [&] {
          static_cast<void>(set.get_batch(std::array{std::int64_t{0}, index}));
        },
        ThrowsMessage<UsageError>(HasSubstr("no sample " + std::to_string(index))));
  }
}

TEST(Subset, HasTheSamplesAtItsIndices) {
  const Subset set(Squares(10), {9, 0, 9, 4});
  ASSERT_EQ(set.size(), 4);
  EXPECT_THAT((std::array{set.get(0), set.get(1), set.get(2), set.get(3)}),
              ElementsAre(81, 0, 81, 16));
  static_assert(!MakesBatches<decltype(set)> && !TakesGenerator<decltype(set)>);
  EXPECT_THAT([&] { set.get(4); }, ThrowsMessage<UsageError>(HasSubstr("no sample 4")));
  EXPECT_THAT(
      [] {
        Subset(Squares(10), {3, 10});
      },
      ThrowsMessage<UsageError>(HasSubstr("no sample 10")));
}

TEST(Subset, HasBatchesAndGeneratorsIfTheDatasetHas) {
  const Subset rows(TensorDataset(at::arange(5, at::kLong)), {4, 2, 0});
  const auto [batch] = rows.get_batch(std::array<std::int64_t, 2>{2, 0});
  EXPECT_TRUE(batch.equal(at::tensor({0, 4}, at::kLong)));
  EXPECT_THROW(static_cast<void>(rows.get_batch(std::array<std::int64_t, 1>{3})), UsageError);
  const Subset draws(Draws(), {3});
  static_assert(!TakesNoGenerator<decltype(draws)>);
  auto generator = generator_of(5);
  auto same = generator_of(5);
  EXPECT_EQ(draws.get(0, generator), draw(same) * 10 + 3);
}

TEST(Subset, SharesADatasetThatOthersHave) {
  const auto shared = std::make_shared<Squares>(3);
  const Subset set(shared, {2});
  EXPECT_EQ(&set.dataset(), shared.get());
  EXPECT_EQ(&Subset(set).dataset(), shared.get());
}

struct SplitCase {
  std::int64_t size;
  std::vector<double> lengths;
  std::uint64_t seed;
  std::vector<std::vector<std::int64_t>> indices;
};

TEST(RandomSplit, IsThatOfPyTorch) {
  const SplitCase cases[] = {
#include "random_split_expected.inc"
  };
  for (const SplitCase& expected : cases) {
    const bool fractions = expected.lengths[0] < 1;
    const std::vector<std::int64_t> counts(expected.lengths.begin(), expected.lengths.end());
    const auto parts = fractions
                           ? random_split(Squares(expected.size), expected.lengths, expected.seed)
                           : random_split(Squares(expected.size), counts, expected.seed);
    std::vector<std::vector<std::int64_t>> indices;
    for (const auto& part : parts) {
      indices.push_back(part.indices());
      EXPECT_EQ(&part.dataset(), &parts[0].dataset());
    }
    EXPECT_EQ(indices, expected.indices);
  }
}

TEST(RandomSplit, TakesLengthsInBraces) {
  EXPECT_EQ(random_split(Squares(5), {2, 3}, 1)[1].size(), 3);
  EXPECT_EQ(random_split(Squares(10), {0.8, 0.2})[0].size(), 8);
  EXPECT_EQ(random_split(Squares(10), {0.3, 0.7})[0].size(), 3);
  EXPECT_EQ(random_split(std::make_shared<Squares>(10), {0.1, 0.2, 0.7})[2].size(), 7);
}

TEST(RandomSplit, RejectsLengthsThatDoNotAddUp) {
  const auto expect = [](const std::string& reason, const auto& lengths) {
    EXPECT_THAT([&] { static_cast<void>(random_split(Squares(10), lengths)); },
                ThrowsMessage<UsageError>(HasSubstr(reason)));
  };
  expect("the lengths 4, 5 do not add up to the data set's size, 10", std::vector{4, 5});
  expect("the lengths 11, -1 do not add up", std::vector{11, -1});
  expect("the lengths 9223372036854775807, 9223372036854775807, 12 do not",
         std::vector<std::int64_t>{INT64_MAX, INT64_MAX, 12});
  expect("the fractions 0.5, 0.4 do not add up to 1", std::vector{0.5, 0.4});
  expect("do not add up to 1", std::vector{0.5, 0.4999999});
  expect("do not add up to 1", std::vector{0.5, 0.5000001});
  expect("the fraction -0.5 is not from 0 to 1", std::vector{1.0, -0.5, 0.5});
}

TEST(ConcatDataset, HasTheSamplesOfEachInTurn) {
  const ConcatDataset set(Squares(3), Subset(Squares(10), {9, 8}), Squares(0), Squares(2));
  ASSERT_EQ(set.size(), 7);
  std::vector<std::int64_t> samples;
  for (int i = 0; i < 7; ++i) samples.push_back(set.get(i));
  EXPECT_THAT(samples, ElementsAre(0, 1, 4, 81, 64, 0, 1));
  EXPECT_THAT([&] { set.get(7); }, ThrowsMessage<UsageError>(HasSubstr("no sample 7")));
  EXPECT_THAT([&] { set.get(-1); }, ThrowsMessage<UsageError>(HasSubstr("no sample -1")));
}

TEST(ConcatDataset, TakesAGeneratorIfOneOfThemDoes) {
  const ConcatDataset set(Squares(3), Draws());
  static_assert(TakesGenerator<decltype(set)> && !TakesNoGenerator<decltype(set)>);
  auto generator = generator_of(5);
  auto same = generator_of(5);
  EXPECT_EQ(set.get(2, generator), 4);
  EXPECT_EQ(set.get(4, generator), draw(same) * 10 + 1);
}

TEST(Map, AppliesAFunctionToSamples) {
  const auto set = map(Squares(5), [](std::int64_t square) { return std::to_string(square); });
  EXPECT_EQ(set.size(), 5);
  EXPECT_EQ(set.get(4), "16");
  static_assert(std::is_same_v<SampleOf<decltype(set)>, std::string>);
  static_assert(!TakesGenerator<decltype(set)>);
  const auto longer = map(set, [](const std::string& text) { return text + "!"; });
  EXPECT_EQ(longer.get(3), "9!");
}

TEST(Map, PassesItsGeneratorOn) {
  const auto noisy = map(Squares(5), [](std::int64_t square, at::Generator& generator) {
    return square + 1000 * draw(generator);
  });
  static_assert(TakesGenerator<decltype(noisy)> && !TakesNoGenerator<decltype(noisy)>);
  // In the order in which the maps are nested; one without a generator takes no numbers.
  const auto both = map(map(noisy, [](std::int64_t value) { return std::pair(value, -value); }),
                        [](std::pair<std::int64_t, std::int64_t> values, at::Generator& generator) {
                          return std::tuple(values.first, values.second, draw(generator));
                        });
  static_assert(TakesGenerator<decltype(both)> && !TakesNoGenerator<decltype(both)>);
  auto generator = generator_of(5);
  auto same = generator_of(5);
  const auto [a, b, c] = both.get(3, generator);
  EXPECT_EQ(a, 9 + 1000 * draw(same));
  EXPECT_EQ(b, -a);
  EXPECT_EQ(c, draw(same));
}

TEST(Map, PrefersTheDatasetsGenerator) {
  const auto set = map(Draws(), [](std::int64_t value) { return value; });
  static_assert(TakesGenerator<decltype(set)> && !TakesNoGenerator<decltype(set)>);
  auto generator = generator_of(5);
  auto same = generator_of(5);
  EXPECT_EQ(set.get(2, generator), draw(same) * 10 + 2);
}

TEST(Map, SharesADatasetThatOthersHave) {
  const auto shared = std::make_shared<Squares>(3);
  const auto set = map(shared, [](std::int64_t square) { return square + 1; });
  shared->count = 7;
  EXPECT_EQ(set.size(), 7);
  const auto copy = set;
  EXPECT_EQ(copy.get(2), 5);
}

TEST(DatasetAdapters, RejectNullPointers) {
  const std::shared_ptr<Squares> null;
  const auto is_refused = ThrowsMessage<UsageError>(HasSubstr("a null pointer"));
  EXPECT_THAT([&] { Subset<Squares>(null, {}); }, is_refused);
  EXPECT_THAT([&] { map(null, [](std::int64_t sample) { return sample; }); }, is_refused);
  EXPECT_THAT([&] { random_split(null, {1}); }, is_refused);
}

}  // namespace
}  // namespace paceline::data
