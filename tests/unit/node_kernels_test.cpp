#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "node/kernels.h"
#include "support/reduction.h"

namespace paceline::node {
namespace {

constexpr std::size_t kCounts[] = {0, 1, 3, 63, 64, 65, 1023, 1024, 1025, 5000};

float bfloat16_value(std::uint16_t bits) {
  return std::bit_cast<float>(std::uint32_t{bits} << 16);
}

template <typename T>
std::vector<std::vector<T>> random_sources(int ranks, std::size_t count, unsigned seed) {
  std::mt19937_64 random(seed);
  std::vector<std::vector<T>> sources(static_cast<std::size_t>(ranks), std::vector<T>(count));
  for (auto& source : sources) {
    for (T& value : source) {
      if constexpr (std::is_floating_point_v<T>) {
        value = static_cast<T>(std::normal_distribution<double>(0, 3)(random));
      } else if constexpr (sizeof(T) == 2) {  // bfloat16 bits of a moderate number
        const auto number = static_cast<float>(std::normal_distribution<double>(0, 3)(random));
        value = static_cast<T>(std::bit_cast<std::uint32_t>(number) >> 16);
      } else {
        value = static_cast<T>(random() % 2'000'001) - 1'000'000;
      }
    }
  }
  return sources;
}

template <typename T>
std::vector<T> run(ReduceFunction function, DataType type, ReduceOp op,
                   const std::vector<std::vector<T>>& sources) {
  std::vector<const void*> from;
  for (const auto& source : sources) from.push_back(source.data());
  std::vector<T> first(sources[0].size());
  std::vector<T> second(sources[0].size());
  const std::array<void*, 2> to{first.data(), second.data()};
  function(type, op, from, to, sources[0].size());
  EXPECT_TRUE(first.empty() ||
              std::memcmp(first.data(), second.data(), first.size() * sizeof(T)) == 0);
  return first;
}

template <typename T>
void check_type(DataType type, double (*value)(T), double tolerance) {
  for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::min, ReduceOp::max}) {
    if (op == ReduceOp::avg && type == DataType::int64) continue;
    for (const int ranks : {1, 2, 3, 4, 5, 8}) {
      for (const std::size_t count : kCounts) {
        const auto sources = random_sources<T>(ranks, count, static_cast<unsigned>(count) + 7);
        const auto result = run(reduce_variants().front(), type, op, sources);
        for (std::size_t i = 0; i < count; ++i) {
          const double expected = test::reduced(op, ranks, [&](int rank) {
            return value(sources[static_cast<std::size_t>(rank)][i]);
          });
          ASSERT_NEAR(value(result[i]), expected, tolerance)
              << name(type) << ' ' << name(op) << " ranks " << ranks << " element " << i;
        }
        for (const ReduceFunction variant : reduce_variants()) {
          ASSERT_EQ(run(variant, type, op, sources), result)
              << name(type) << ' ' << name(op) << " differs between instruction sets";
        }
      }
    }
  }
}

TEST(Kernels, Float32) {
  check_type<float>(
      DataType::float32, [](float x) { return static_cast<double>(x); }, 2e-5);
}
TEST(Kernels, Float64) {
  check_type<double>(
      DataType::float64, [](double x) { return x; }, 1e-13);
}
TEST(Kernels, Int64) {
  check_type<std::int64_t>(
      DataType::int64, [](std::int64_t x) { return static_cast<double>(x); }, 0);
}
TEST(Kernels, BFloat16RoundsOnce) {
  // Half a unit in the last place of results below 64, plus float32's error.
  check_type<std::uint16_t>(
      DataType::bfloat16, [](std::uint16_t x) { return static_cast<double>(bfloat16_value(x)); },
      0.1251);
}

TEST(Kernels, BFloat16RoundsToNearestEven) {
  // 1 + 2^-8 lies halfway between 1 and 1 + 2^-7; so does 1 + 3*2^-8 between odd and even.
  const std::uint16_t one = 0x3f80;
  const std::uint16_t half_unit = 0x3b80;
  EXPECT_EQ(run<std::uint16_t>(&reduce, DataType::bfloat16, ReduceOp::sum, {{one}, {half_unit}}),
            std::vector<std::uint16_t>{one});
  EXPECT_EQ(run<std::uint16_t>(&reduce, DataType::bfloat16, ReduceOp::sum,
                               {{std::uint16_t{one + 1}}, {half_unit}}),
            std::vector<std::uint16_t>{one + 2});
}

TEST(Kernels, Int64Wraps) {
  const auto largest = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(run<std::int64_t>(&reduce, DataType::int64, ReduceOp::sum, {{largest}, {1}}),
            std::vector<std::int64_t>{std::numeric_limits<std::int64_t>::min()});
}

TEST(Kernels, NanIsCanonicalInEveryPositionAndOperation) {
  const float odd_nan = std::bit_cast<float>(0xffc12345u);
  const std::uint32_t canonical = 0x7fc00000u;
  for (const ReduceFunction variant : reduce_variants()) {
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::min, ReduceOp::max}) {
      for (std::size_t at = 0; at < 3; ++at) {
        std::vector<std::vector<float>> sources(3, std::vector<float>(37, 1.0f));
        for (float& value : sources[at]) value = odd_nan;
        for (const float result : run(variant, DataType::float32, op, sources)) {
          ASSERT_EQ(std::bit_cast<std::uint32_t>(result), canonical) << name(op) << at;
        }
      }
    }
  }
  const auto half = run<std::uint16_t>(&reduce, DataType::bfloat16, ReduceOp::max,
                                       {{0xffc1, 0x7f80}, {0x3f80, 0x3f80}});
  EXPECT_EQ(half, (std::vector<std::uint16_t>{0x7fc0, 0x7f80}));
}

TEST(Kernels, ADestinationMayBeASource) {
  auto sources = random_sources<float>(3, 5000, 1);
  const auto expected = run<float>(&reduce, DataType::float32, ReduceOp::sum, sources);
  const void* const from[] = {sources[0].data(), sources[1].data(), sources[2].data()};
  void* const to[] = {sources[0].data(), sources[1].data(), sources[2].data()};
  reduce(DataType::float32, ReduceOp::sum, from, to, 5000);
  for (const auto& source : sources) EXPECT_EQ(source, expected);
}

}  // namespace
}  // namespace paceline::node
