#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "shm/kernels/kernels.h"
#include "support/kernel_oracle.h"

namespace paceline::shm {
namespace {

using namespace test::exact;

constexpr std::size_t kSourceCounts[] = {1, 2, 3, 5};
constexpr double kWeights[] = {0.25, 1.0 / 3, 1e-3, 0.5, 7};

// Copies of bytes that begin `shift` behind an aligned address, with a fence behind them.
class Copies {
 public:
  Copies(const std::vector<Bytes>& contents, std::size_t shift) {
    for (const Bytes& content : contents) add(content, shift);
  }
  Copies(std::size_t number, std::size_t bytes, std::size_t shift) {
    for (std::size_t i = 0; i < number; ++i) add(Bytes(bytes), shift);
  }

  std::vector<const void*> sources() const {
    std::vector<const void*> result;
    for (const Bytes& copy : copies_) result.push_back(copy.data() + shift_);
    return result;
  }
  std::vector<void*> destinations() {
    std::vector<void*> result;
    for (Bytes& copy : copies_) result.push_back(copy.data() + shift_);
    return result;
  }
  bool all_hold(const Bytes& content) const {
    return std::ranges::all_of(copies_, [&](const Bytes& copy) {
      const auto rest = std::span(copy).subspan(shift_);
      return std::ranges::equal(rest.first(content.size()), content) &&
             std::ranges::all_of(rest.subspan(content.size()),
                                 [](std::uint8_t byte) { return byte == kFence; });
    });
  }

 private:
  static constexpr std::uint8_t kFence = 0xa5;

  void add(const Bytes& content, std::size_t shift) {
    shift_ = shift;
    Bytes& copy = copies_.emplace_back(shift, kFence);
    copy.insert(copy.end(), content.begin(), content.end());
    copy.resize(copy.size() + 256, kFence);
  }

  std::size_t shift_ = 0;
  std::vector<Bytes> copies_;
};

// What `reduce` makes of the sources in one go.
Bytes reduced_at_once(DataType type, ReduceOp op, const std::vector<Bytes>& sources,
                      std::span<const double> weights) {
  Bytes result(sources[0].size());
  void* const to[] = {result.data()};
  const Copies copies(sources, 0);
  const std::size_t count = result.size() / element_size(type);
  reduce(type, op, {copies.sources(), weights}, static_cast<double>(sources.size()), to, count);
  return result;
}

// By each variant of accumulate, and then by each of complete.
void expect_same_in_halves(DataType type, ReduceOp op, const std::vector<Bytes>& sources,
                           std::span<const double> weights, const Bytes& expected_sums) {
  const Bytes expected = reduced_at_once(type, op, sources, weights);
  const std::size_t count = expected.size() / element_size(type);
  for (const std::size_t shift : {std::size_t{0}, std::size_t{1}, element_size(type)}) {
    for (const Kernels& first : kernel_variants()) {
      const Copies from(sources, shift);
      Copies sums(1, expected_sums.size(), shift);
      first.accumulate(type, op, {from.sources(), weights}, sums.destinations()[0], count);
      ASSERT_TRUE(sums.all_hold(expected_sums))
          << name(type) << ' ' << name(op) << ", sums of " << count << ", shifted by " << shift;
      for (const Kernels& second : kernel_variants()) {
        Copies to(3, expected.size(), shift);
        second.complete(type, op, {.sources = sums.sources()}, static_cast<double>(sources.size()),
                        to.destinations(), count);
        ASSERT_TRUE(to.all_hold(expected))
            << name(type) << ' ' << name(op) << ", " << count << ", shifted by " << shift;
      }
    }
  }
}

// The values in the type that they are accumulated in.
template <typename T>
auto widened(const std::vector<T>& values) {
  if constexpr (kShort<T>) {
    std::vector<float> wide;
    for (const T value : values) wide.push_back(value.value());
    return wide;
  } else {
    return values;
  }
}
template <typename T>
auto widened(const std::vector<std::vector<T>>& sources) {
  std::vector<decltype(widened(sources[0]))> wide;
  for (const auto& source : sources) wide.push_back(widened(source));
  return wide;
}

class PartialSums : public testing::TestWithParam<std::pair<DataType, ReduceOp>> {};

TEST_P(PartialSums, OfAllSourcesCompletedAreWhatReduceGives) {
  const auto [type, op] = GetParam();
  visit_type(type, [&, type = type, op = op](auto zero) {
    for (const std::size_t source_count : kSourceCounts) {
      for (const std::size_t count : kCounts) {
        const auto sources = random_sources<decltype(zero)>(source_count, count);
        const Bytes sums = bytes_of(oracle(accumulation(op), widened(sources)));
        expect_same_in_halves(type, op, bytes_of(sources), {}, sums);
        if (HasFatalFailure()) return;
      }
    }
  });
}

// Of a job of other ranks too, so the divisor is not the number of sums.
TEST_P(PartialSums, OfSeveralNodesAreCombinedInOrderAndNarrowedOnce) {
  const auto [type, op] = GetParam();
  visit_type(type, [&, type = type, op = op](auto zero) {
    using T = decltype(zero);
    for (const std::size_t sum_count : kSourceCounts) {
      for (const std::size_t count : kCounts) {
        const auto sums = widened(random_sources<T>(sum_count, count));
        // Zeros that add nothing, not even to -0, so that the oracle divides by as many.
        std::vector divided(sums.begin(), sums.end());
        using Sum = std::remove_cvref_t<decltype(sums[0][0])>;
        if constexpr (!std::same_as<Sum, Boolean>) {
          const std::vector<Sum> nothing(count, static_cast<Sum>(-Sum{}));
          if (op == ReduceOp::avg) divided.resize(sum_count + 4, nothing);
        }
        std::vector<T> expected;
        for (const auto& value : oracle(op, divided)) expected.push_back(narrowed<T>(value));
        for (const Kernels& kernels : kernel_variants()) {
          const Copies from(bytes_of(sums), 1);
          Copies to(2, expected.size() * sizeof(T), 3);
          kernels.complete(type, op, {.sources = from.sources()},
                           static_cast<double>(divided.size()), to.destinations(), count);
          ASSERT_TRUE(to.all_hold(bytes_of(expected)))
              << name(type) << ' ' << name(op) << ", " << sum_count << " sums of " << count;
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Kernels, PartialSums, testing::ValuesIn(reducible_pairs()),
                         [](const auto& each) {
                           return std::string(name(each.param.first)) + '_' +
                                  name(each.param.second);
                         });

class WeightedPartialSums : public testing::TestWithParam<DataType> {};

TEST_P(WeightedPartialSums, CompletedAreWhatReduceGives) {
  visit_type(GetParam(), [&](auto zero) {
    using T = decltype(zero);
    if constexpr (!std::integral<T> && !std::same_as<T, Boolean>) {
      for (const std::size_t source_count : kSourceCounts) {
        const std::span weights = std::span(kWeights).first(source_count);
        for (const std::size_t count : kCounts) {
          const auto sources = random_sources<T>(source_count, count);
          std::vector<decltype(weighted(T{}, 1))> sums;
          for (std::size_t i = 0; i < count; ++i) {
            decltype(sums) parts;
            for (std::size_t k = 0; k < source_count; ++k) {
              parts.push_back(weighted(sources[k][i], weights[k]));
            }
            sums.push_back(reduced(ReduceOp::sum, parts));
          }
          expect_same_in_halves(GetParam(), ReduceOp::sum, bytes_of(sources), weights,
                                bytes_of(sums));
          if (HasFatalFailure()) return;
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Kernels, WeightedPartialSums,
                         testing::Values(DataType::float32, DataType::float64, DataType::float16,
                                         DataType::bfloat16, DataType::complex64,
                                         DataType::complex128),
                         [](const auto& each) { return std::string(name(each.param)); });

// Splits the leaves [begin, end) into the fewest nodes, and returns the first leaf of each.
std::vector<int> nodes_of(int begin, int end) {
  std::vector<int> firsts;
  while (begin < end) {
    firsts.push_back(begin);
    int leaves = 1;
    while (begin % (2 * leaves) == 0 && begin + 2 * leaves <= end) leaves *= 2;
    begin += leaves;
  }
  return firsts;
}

class SumsOfNodes : public testing::TestWithParam<DataType> {};

// As ranks do that each have some of the leaves, of which some are missing.
TEST_P(SumsOfNodes, CompletedDependOnLeavesOnly) {
  visit_type(GetParam(), [&](auto zero) {
    using T = decltype(zero);
    if constexpr (!std::integral<T> && !std::same_as<T, Boolean>) {
      constexpr std::size_t kCount = 37;
      std::mt19937 random(3);
      for (int leaves = 1; leaves <= 20; ++leaves) {
        const auto number = static_cast<std::size_t>(leaves);
        const auto values = random_sources<T>(number, kCount);
        std::vector<bool> present;
        for (int leaf = 0; leaf < leaves; ++leaf) present.push_back(random() % 6 != 0);
        present[random() % number] = true;
        std::vector<T> expected;
        for (std::size_t i = 0; i < kCount; ++i) {
          using Sum = decltype(weighted(T{}, 1));
          std::vector<std::optional<Sum>> terms;
          for (std::size_t leaf = 0; leaf < number; ++leaf) {
            terms.push_back(present[leaf] ? std::optional(weighted(values[leaf][i], 1 + leaf))
                                          : std::nullopt);
          }
          const Sum sum = root_of(terms, [](Sum a, Sum b) {
            return reduced(ReduceOp::sum, std::vector{a, b});
          });
          expected.push_back(narrowed<T>(divided(sum, 1.3)));
        }
        for (int parts = 1; parts <= leaves; ++parts) {
          std::vector<std::vector<std::byte>> sums;
          std::vector<int> firsts;
          for (int part = 0; part < parts; ++part) {
            const int end = (part + 1) * leaves / parts;
            const auto nodes = nodes_of(part * leaves / parts, end);
            for (std::size_t node = 0; node < nodes.size(); ++node) {
              const int behind = node + 1 < nodes.size() ? nodes[node + 1] : end;
              std::vector<const void*> sources;
              std::vector<double> weights;
              std::vector<int> indices;
              for (int leaf = nodes[node]; leaf < behind; ++leaf) {
                const auto index = static_cast<std::size_t>(leaf);
                if (!present[index]) continue;
                sources.push_back(values[index].data());
                weights.push_back(1 + leaf);
                indices.push_back(leaf);
              }
              if (sources.empty()) continue;
              firsts.push_back(nodes[node]);
              sums.emplace_back(kCount * element_size(accumulation_type(GetParam())));
              accumulate(GetParam(), ReduceOp::avg, {sources, weights, indices}, sums.back().data(),
                         kCount);
            }
          }
          std::vector<const void*> sources;
          for (const auto& sum : sums) sources.push_back(sum.data());
          std::vector<T> result(kCount);
          void* const to[] = {result.data()};
          complete(GetParam(), ReduceOp::avg, {.sources = sources, .leaves = firsts}, 1.3, to,
                   kCount);
          ASSERT_EQ(bytes_of(result), bytes_of(expected)) << leaves << " leaves, " << parts;
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Kernels, SumsOfNodes,
                         testing::Values(DataType::float32, DataType::float64, DataType::float16,
                                         DataType::bfloat16, DataType::complex64,
                                         DataType::complex128),
                         [](const auto& each) { return std::string(name(each.param)); });

// A job has more ranks than an integer of 8 bits counts.
TEST(Kernels, DividePartialSumsByMoreThanTheirTypeHolds) {
  const std::array<std::int8_t, 4> sums{-128, 127, 0, -1};
  for (const Kernels& kernels : kernel_variants()) {
    for (const int divisor : {127, 128, 129, 256, 1024}) {
      std::array<std::int8_t, 4> result{1, 1, 1, 1};
      const std::array<const void*, 1> from{sums.data()};
      const std::array<void*, 1> to{result.data()};
      kernels.complete(DataType::int8, ReduceOp::avg, {.sources = from}, divisor, to, sums.size());
      for (std::size_t i = 0; i < sums.size(); ++i) {
        EXPECT_EQ(result[i], sums[i] / divisor) << divisor;
      }
      const std::array<std::uint8_t, 2> whole{255, 128};
      std::array<std::uint8_t, 2> quotient{9, 9};
      const std::array<const void*, 1> unsigned_from{whole.data()};
      const std::array<void*, 1> unsigned_to{quotient.data()};
      kernels.complete(DataType::uint8, ReduceOp::avg, {.sources = unsigned_from}, divisor,
                       unsigned_to, 2);
      for (std::size_t i = 0; i < whole.size(); ++i) {
        EXPECT_EQ(quotient[i], whole[i] / divisor) << divisor;
      }
    }
  }
}

}  // namespace
}  // namespace paceline::shm
