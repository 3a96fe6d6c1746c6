#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <complex>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "shm/kernels/kernels.h"
#include "support/kernel_oracle.h"

namespace paceline::shm {
namespace {

using namespace test::exact;

// A copy of bytes that begins `shift` behind an aligned address and between two fences.
class Placed {
 public:
  Placed(const Bytes& content, std::size_t shift)
      : begin_(kFence + shift), size_(content.size()), bytes_(begin_ + size_ + kFence, kUntouched) {
    std::ranges::copy(content, bytes_.begin() + static_cast<std::ptrdiff_t>(begin_));
  }

  std::uint8_t* data() { return bytes_.data() + begin_; }

  bool holds(const Bytes& content) { return std::ranges::equal(content, std::span(data(), size_)); }

  bool fences_stand() {
    static const Bytes fence(kFence, kUntouched);
    return std::memcmp(data() - kFence, fence.data(), kFence) == 0 &&
           std::memcmp(data() + size_, fence.data(), kFence) == 0;
  }

 private:
  static constexpr std::size_t kFence = 256;
  static constexpr std::uint8_t kUntouched = 0xa5;
  std::size_t begin_;
  std::size_t size_;
  Bytes bytes_;
};

std::string first_difference(std::size_t element, const std::vector<Bytes>& sources,
                             std::span<const std::uint8_t> actual, const Bytes& expected) {
  const auto differing = std::ranges::mismatch(actual, expected).in1 - actual.begin();
  const std::size_t i = static_cast<std::size_t>(differing) / element;
  const auto hex = [&](std::span<const std::uint8_t> bytes) {
    return testing::PrintToString(bytes.subspan(i * element, element));
  };
  std::string text =
      "\nelement " + std::to_string(i) + ": " + hex(actual) + "\ninstead of " + hex(expected);
  for (const Bytes& source : sources) text += "\n      from " + hex(source);
  return text;
}

// The first `destinations` sources are also destinations, or none is.
void expect_reduces(const Kernels& kernels, DataType type, ReduceOp op,
                    const std::vector<Bytes>& sources, std::size_t destinations, bool in_place,
                    std::size_t shift, const Bytes& expected) {
  const auto where = [&] {
    std::ostringstream text;
    text << name(type) << ' ' << name(op) << ", variant " << &kernels - kernel_variants().data()
         << ", " << sources.size() << " to " << destinations << (in_place ? " in place" : "")
         << ", shifted by " << shift << ", " << expected.size() << " bytes";
    return text.str();
  };
  std::vector<Placed> inputs;
  std::vector<Placed> outputs;
  std::vector<const void*> from;
  std::vector<void*> to;
  // Each at another distance from an aligned address.
  for (const Bytes& source : sources) inputs.emplace_back(source, shift * (1 + inputs.size()));
  for (std::size_t i = 0; i < destinations && !in_place; ++i) {
    outputs.emplace_back(Bytes(expected.size()), shift * (i + 2));
  }
  for (Placed& input : inputs) from.push_back(input.data());
  auto& results = in_place ? inputs : outputs;
  for (std::size_t i = 0; i < destinations; ++i) to.push_back(results[i].data());

  kernels.reduce(type, op, {.sources = from}, static_cast<double>(from.size()), to,
                 expected.size() / element_size(type));

  for (std::size_t i = 0; i < destinations; ++i) {
    ASSERT_TRUE(results[i].holds(expected))
        << where()
        << first_difference(element_size(type), sources, {results[i].data(), expected.size()},
                            expected);
  }
  for (Placed& input : inputs) ASSERT_TRUE(input.fences_stand()) << where();
  for (Placed& output : outputs) ASSERT_TRUE(output.fences_stand()) << where();
  for (std::size_t i = in_place ? destinations : 0; i < inputs.size(); ++i) {
    ASSERT_TRUE(inputs[i].holds(sources[i])) << where() << ": a source was changed";
  }
}

void expect_reduces_anywhere(DataType type, ReduceOp op, const std::vector<Bytes>& sources,
                             const Bytes& expected) {
  for (const Kernels& kernels : kernel_variants()) {
    for (const std::size_t shift : {std::size_t{0}, std::size_t{1}, element_size(type)}) {
      for (const std::size_t destinations : {std::size_t{1}, std::size_t{2}, sources.size()}) {
        expect_reduces(kernels, type, op, sources, destinations, false, shift, expected);
        if (destinations <= sources.size()) {
          expect_reduces(kernels, type, op, sources, destinations, true, shift, expected);
        }
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

class Reduction : public testing::TestWithParam<std::pair<DataType, ReduceOp>> {};

TEST_P(Reduction, EqualsTheOracleBitForBit) {
  const auto [type, op] = GetParam();
  visit_type(type, [&, type = type, op = op](auto zero) {
    using T = decltype(zero);
    ASSERT_EQ(element_size(type), sizeof(T));
    const auto check = [&](std::size_t source_count, std::size_t count) {
      const auto sources = random_sources<T>(source_count, count);
      expect_reduces_anywhere(type, op, bytes_of(sources), bytes_of(oracle(op, sources)));
    };
    for (const std::size_t source_count : {1, 2, 3, 5, 8}) {
      for (const std::size_t count : kCounts) check(source_count, count);
    }
    check(kMaxSources, 67);
  });
}

INSTANTIATE_TEST_SUITE_P(Kernels, Reduction, testing::ValuesIn(reducible_pairs()),
                         [](const auto& each) {
                           return std::string(name(each.param.first)) + '_' +
                                  name(each.param.second);
                         });

class WeightedAverage : public testing::TestWithParam<DataType> {};

TEST_P(WeightedAverage, EqualsTheOracleBitForBit) {
  const double all_weights[] = {0.25, 1.0 / 3, 1e-3, 0.5, 7};
  constexpr double kTotal = 1.7;
  visit_type(GetParam(), [&](auto zero) {
    using T = decltype(zero);
    if constexpr (!std::integral<T> && !std::same_as<T, Boolean>) {
      for (const std::size_t source_count : {1, 2, 3, 5}) {
        const std::span weights = std::span(all_weights).first(source_count);
        for (const std::size_t count : kCounts) {
          auto sources = random_sources<T>(source_count, count);
          std::vector<T> expected;
          for (std::size_t i = 0; i < count; ++i) {
            std::vector<decltype(weighted(T{}, 1))> parts;
            for (std::size_t k = 0; k < source_count; ++k) {
              parts.push_back(weighted(sources[k][i], weights[k]));
            }
            expected.push_back(narrowed<T>(divided(reduced(ReduceOp::sum, parts), kTotal)));
          }
          for (const Kernels& kernels : kernel_variants()) {
            auto copies = sources;
            std::vector<const void*> from;
            std::vector<void*> to;
            for (auto& copy : copies) from.push_back(to.emplace_back(copy.data()));
            kernels.reduce(GetParam(), ReduceOp::avg, {from, weights}, kTotal, to, count);
            for (const auto& copy : copies) ASSERT_EQ(bytes_of(copy), bytes_of(expected));
          }
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Kernels, WeightedAverage,
                         testing::Values(DataType::float32, DataType::float64, DataType::float16,
                                         DataType::bfloat16, DataType::complex64,
                                         DataType::complex128),
                         [](const auto& each) { return std::string(name(each.param)); });

TEST(Kernels, IsReducibleListsTypesAndOperations) {
  using enum DataType;
  static_assert(is_reducible(float16, ReduceOp::avg) && is_reducible(complex128, ReduceOp::avg));
  static_assert(is_reducible(int64, ReduceOp::avg) && !is_reducible(boolean, ReduceOp::avg));
  static_assert(is_reducible(boolean, ReduceOp::min) && !is_reducible(complex64, ReduceOp::max));
  static_assert(is_reducible(uint8, ReduceOp::bit_xor) && is_reducible(boolean, ReduceOp::bit_and));
  static_assert(!is_reducible(bfloat16, ReduceOp::bit_or));
  static_assert(!is_reducible(complex64, ReduceOp::bit_or));
  for (const ReduceOp op : kOps) EXPECT_FALSE(is_reducible(byte, op));
  for (const int value : {13, 255}) {
    EXPECT_FALSE(is_reducible(static_cast<DataType>(value), ReduceOp::sum));
    EXPECT_FALSE(is_reducible(int8, static_cast<ReduceOp>(value)));
  }
  // 4 floating types with 5 operations, 2 complex ones with 3, 5 integers with 8, boolean with 7.
  EXPECT_EQ(reducible_pairs().size(), 20u + 6u + 40u + 7u);
}

TEST(Kernels, OperationsHavePyTorchsNames) {
  std::string names;
  for (const ReduceOp op : kOps) names += std::string(name(op)) + ' ';
  EXPECT_EQ(names, "SUM AVG PRODUCT MIN MAX BAND BOR BXOR ");
}

template <typename T>
std::vector<T> run(DataType type, ReduceOp op, const std::vector<std::vector<T>>& sources) {
  std::vector<const void*> from;
  for (const auto& source : sources) from.push_back(source.data());
  std::vector<T> result(sources[0].size());
  void* const to[] = {result.data()};
  reduce(type, op, from, to, result.size());
  return result;
}

using Halves = std::vector<std::vector<std::uint16_t>>;

class ShortPatterns : public testing::TestWithParam<DataType> {};

TEST_P(ShortPatterns, EveryBitPatternIsReducedAsExpected) {
  visit_type(GetParam(), [&](auto zero) {
    using T = decltype(zero);
    if constexpr (kShort<T>) {
      std::vector<T> all(65536);
      for (std::size_t i = 0; i < all.size(); ++i) all[i] = {static_cast<std::uint16_t>(i)};
      std::vector<T> canonical = all;
      for (T& value : canonical) {
        if ((value.bits & 0x7fff) > T::kInfinity) value = {T::kNan};
      }
      std::vector<std::vector<T>> partners(3, all);
      std::mt19937_64 random(5);
      for (auto& partner : partners) std::shuffle(partner.begin(), partner.end(), random);
      // Half a unit in the last place, where there is such a number.
      for (std::size_t i = 0; i < all.size(); ++i) {
        const int half_unit = (all[i].bits & T::kInfinity) - T::kUnit;
        if (half_unit > 0) partners[0][i] = {static_cast<std::uint16_t>(half_unit)};
      }
      for (const ReduceOp op : kOps) {
        if (!is_reducible(GetParam(), op)) continue;
        for (const Kernels& kernels : kernel_variants()) {
          expect_reduces(kernels, GetParam(), op, {bytes_of(all)}, 1, false, 0,
                         bytes_of(canonical));
        }
        for (const auto& partner : partners) {
          const std::vector<std::vector<T>> sources = {all, partner};
          const Bytes expected = bytes_of(oracle(op, sources));
          for (const Kernels& kernels : kernel_variants()) {
            expect_reduces(kernels, GetParam(), op, bytes_of(sources), 2, true, 0, expected);
          }
        }
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Kernels, ShortPatterns,
                         testing::Values(DataType::float16, DataType::bfloat16),
                         [](const auto& each) { return name(each.param); });

TEST(Kernels, ShortTypesRoundOnceToNearestEven) {
  const auto sum = [](DataType type, const Halves& sources) {
    return run(type, ReduceOp::sum, sources)[0];
  };
  // 1 + 2^-8 lies halfway between bfloat16's 1 and 1 + 2^-7, 1 + 3*2^-8 between odd and even.
  EXPECT_EQ(sum(DataType::bfloat16, {{0x3f80}, {0x3b80}}), 0x3f80);
  EXPECT_EQ(sum(DataType::bfloat16, {{0x3f81}, {0x3b80}}), 0x3f82);
  // Rounded after every step, each half unit would be lost.
  EXPECT_EQ(sum(DataType::bfloat16, {{0x3f80}, {0x3b80}, {0x3b80}}), 0x3f81);
  EXPECT_EQ(sum(DataType::float16, {{0x3c00}, {0x1000}}), 0x3c00);
  EXPECT_EQ(sum(DataType::float16, {{0x3c01}, {0x1000}}), 0x3c02);
  EXPECT_EQ(sum(DataType::float16, {{0x3c00}, {0x1000}, {0x1000}}), 0x3c01);
}

TEST(Kernels, Float16HandlesItsLimits) {
  const auto result = [](ReduceOp op, const Halves& sources) {
    return run(DataType::float16, op, sources)[0];
  };
  // 65504 + 16 is halfway to 65536 and rounds there, which is infinity; a little less does not.
  EXPECT_EQ(result(ReduceOp::sum, {{0x7bff}, {0x4c00}}), 0x7c00);
  EXPECT_EQ(result(ReduceOp::sum, {{0x7bff}, {0x4bff}}), 0x7bff);
  // Sums beyond the range come back into it.
  EXPECT_EQ(result(ReduceOp::sum, {{0x7bff}, {0x7bff}, {0xfbff}}), 0x7bff);
  EXPECT_EQ(result(ReduceOp::avg, {{0x7bff}, {0x7bff}}), 0x7bff);
  // Half of the least number is zero, half of thrice that is twice that; the sign remains.
  EXPECT_EQ(result(ReduceOp::avg, {{0x0001}, {0x0000}}), 0x0000);
  EXPECT_EQ(result(ReduceOp::avg, {{0x8003}, {0x0000}}), 0x8002);
  EXPECT_EQ(result(ReduceOp::product, {{0x8001}, {0x3800}}), 0x8000);
}

TEST(Kernels, IntegersWrap) {
  EXPECT_EQ(run<std::int64_t>(DataType::int64, ReduceOp::sum, {{INT64_MAX}, {1}})[0], INT64_MIN);
  EXPECT_EQ(run<std::int16_t>(DataType::int16, ReduceOp::product, {{-32768}, {-1}})[0], -32768);
  EXPECT_EQ(run<std::uint8_t>(DataType::uint8, ReduceOp::product, {{16}, {17}})[0], 16);
}

TEST(Kernels, AveragesOfIntegersAreTruncatedTowardsZero) {
  const auto average = [](const std::vector<std::vector<std::int32_t>>& sources) {
    return run(DataType::int32, ReduceOp::avg, sources);
  };
  EXPECT_EQ(average({{7, -7, -1, 0}, {0, 0, 0, -1}}), (std::vector<std::int32_t>{3, -3, 0, 0}));
  EXPECT_EQ(average({{INT32_MIN}})[0], INT32_MIN);
  // The sum wraps before it is divided.
  EXPECT_EQ(run<std::int8_t>(DataType::int8, ReduceOp::avg, {{100}, {100}})[0], -28);
  EXPECT_EQ(run<std::uint8_t>(DataType::uint8, ReduceOp::avg, {{200}, {100}})[0], 22);
}

TEST(Kernels, BooleansAreZeroOrOne) {
  const std::vector<std::vector<std::uint8_t>> sources = {{0, 2, 0, 0x80}, {0, 0, 4, 255}};
  const auto result = [&](ReduceOp op) { return run(DataType::boolean, op, sources); };
  for (const ReduceOp any : {ReduceOp::sum, ReduceOp::max, ReduceOp::bit_or}) {
    EXPECT_EQ(result(any), (std::vector<std::uint8_t>{0, 1, 1, 1})) << name(any);
  }
  for (const ReduceOp all : {ReduceOp::product, ReduceOp::min, ReduceOp::bit_and}) {
    EXPECT_EQ(result(all), (std::vector<std::uint8_t>{0, 0, 0, 1})) << name(all);
  }
  EXPECT_EQ(result(ReduceOp::bit_xor), (std::vector<std::uint8_t>{0, 1, 1, 0}));
}

TEST(Kernels, MinAndMaxKeepTheFirstOfEqualZeros) {
  for (const ReduceOp op : {ReduceOp::min, ReduceOp::max}) {
    const auto result = run<float>(DataType::float32, op, {{0.0f, -0.0f}, {-0.0f, 0.0f}});
    EXPECT_FALSE(std::signbit(result[0])) << name(op);
    EXPECT_TRUE(std::signbit(result[1])) << name(op);
  }
}

TEST(Kernels, NanAtAnyPositionGivesTheCanonicalNan) {
  const float odd = std::bit_cast<float>(0xffc12345u);
  const float signalling = std::bit_cast<float>(0x7f800001u);
  for (const ReduceOp op :
       {ReduceOp::sum, ReduceOp::avg, ReduceOp::product, ReduceOp::min, ReduceOp::max}) {
    for (const float result : run<float>(DataType::float32, op,
                                         {{odd, 1, 1, 1, signalling},
                                          {1, odd, 1, odd, 1},
                                          {1, 1, odd, signalling, signalling}})) {
      EXPECT_EQ(std::bit_cast<std::uint32_t>(result), 0x7fc00000u) << name(op);
    }
  }
}

TEST(Kernels, ComplexNumbersMultiply) {
  using Z = std::complex<double>;
  EXPECT_EQ(run<Z>(DataType::complex128, ReduceOp::product, {{Z(1, 2)}, {Z(3, 4)}, {Z(0, 1)}})[0],
            Z(-10, -5));
  // In one component only is infinity less infinity.
  const auto result =
      run<Z>(DataType::complex128, ReduceOp::product, {{Z(INFINITY, INFINITY)}, {Z(1, 1)}})[0];
  EXPECT_EQ(std::bit_cast<std::uint64_t>(result.real()), 0x7ff8000000000000u);
  EXPECT_EQ(result.imag(), INFINITY);
}

}  // namespace
}  // namespace paceline::shm
