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

namespace paceline::shm {
namespace {

constexpr ReduceOp kOps[] = {ReduceOp::sum,    ReduceOp::avg,    ReduceOp::product,
                             ReduceOp::min,    ReduceOp::max,    ReduceOp::bit_and,
                             ReduceOp::bit_or, ReduceOp::bit_xor};
constexpr std::size_t kCounts[] = {0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 1000};

std::vector<std::pair<DataType, ReduceOp>> reducible_pairs() {
  std::vector<std::pair<DataType, ReduceOp>> pairs;
  for (int type = 0; type <= static_cast<int>(DataType::byte); ++type) {
    for (const ReduceOp op : kOps) {
      if (is_reducible(static_cast<DataType>(type), op)) {
        pairs.emplace_back(static_cast<DataType>(type), op);
      }
    }
  }
  return pairs;
}

// What one element should be, reduced one step at a time.

template <typename T>
T canonical(T value) {
  return std::isnan(value) ? std::numeric_limits<T>::quiet_NaN() : value;
}

// Twice the digits and two more: rounded to double first, a float32 result is still correct.
float step(ReduceOp op, float a, float b) {
  const double x = a;
  const double y = b;
  if (op == ReduceOp::sum) return static_cast<float>(x + y);
  if (op == ReduceOp::product) return static_cast<float>(x * y);
  if (op == ReduceOp::avg) return static_cast<float>(x / y);
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<float>::quiet_NaN();
  return op == ReduceOp::min ? std::min(a, b) : std::max(a, b);
}

// volatile: nothing here may be contracted to a fused multiply-add.
double step(ReduceOp op, double a, double b) {
  volatile double result = 0;
  if (op == ReduceOp::sum) {
    result = a + b;
  } else if (op == ReduceOp::product) {
    result = a * b;
  } else if (op == ReduceOp::avg) {
    result = a / b;
  } else if (std::isnan(a) || std::isnan(b)) {
    result = std::numeric_limits<double>::quiet_NaN();
  } else {
    result = op == ReduceOp::min ? std::min(a, b) : std::max(a, b);
  }
  return result;
}

// The accumulators of avg are sums; `avg` itself is the division at the end.
ReduceOp accumulation(ReduceOp op) {
  return op == ReduceOp::avg ? ReduceOp::sum : op;
}

template <typename T>
T reduced_floating(ReduceOp op, const std::vector<T>& values) {
  T result = values[0];
  for (std::size_t i = 1; i < values.size(); ++i) {
    result = step(accumulation(op), result, values[i]);
  }
  return op == ReduceOp::avg ? step(op, result, static_cast<T>(values.size())) : result;
}

float reduced(ReduceOp op, const std::vector<float>& values) {
  return canonical(reduced_floating(op, values));
}
double reduced(ReduceOp op, const std::vector<double>& values) {
  return canonical(reduced_floating(op, values));
}

template <typename T>
std::complex<T> reduced(ReduceOp op, const std::vector<std::complex<T>>& values) {
  const auto part = [&](T (*get)(const std::complex<T>&)) {
    std::vector<T> parts;
    std::transform(values.begin(), values.end(), std::back_inserter(parts), get);
    return reduced(op, parts);
  };
  if (op != ReduceOp::product) {
    return {part([](const std::complex<T>& z) { return z.real(); }),
            part([](const std::complex<T>& z) { return z.imag(); })};
  }
  T real = values[0].real();
  T imaginary = values[0].imag();
  const auto times = [](T a, T b) { return step(ReduceOp::product, a, b); };
  for (std::size_t i = 1; i < values.size(); ++i) {
    const T c = values[i].real();
    const T d = values[i].imag();
    const T next = step(ReduceOp::sum, times(real, c), -times(imaginary, d));
    imaginary = step(ReduceOp::sum, times(real, d), times(imaginary, c));
    real = next;
  }
  return {canonical(real), canonical(imaginary)};
}

// A 16-bit floating type, by its definition.
template <int fraction_bits>
struct Short {
  static constexpr int kMaxExponent = (1 << (14 - fraction_bits)) - 1;
  static constexpr std::uint16_t kInfinity = 0x7fff >> fraction_bits << fraction_bits;
  // From a power of two to half a unit in its last place.
  static constexpr int kUnit = (fraction_bits + 1) << fraction_bits;
  static constexpr std::uint16_t kNan = kInfinity | 1 << (fraction_bits - 1);

  std::uint16_t bits;

  float value() const {
    const int exponent = (bits & 0x7fff) >> fraction_bits;
    const int fraction = bits & ((1 << fraction_bits) - 1);
    float magnitude = std::ldexp(static_cast<float>(fraction + (exponent ? 1 << fraction_bits : 0)),
                                 std::max(exponent, 1) - kMaxExponent - fraction_bits);
    if ((bits & kInfinity) == kInfinity) magnitude = fraction ? NAN : INFINITY;
    return std::copysign(magnitude, bits & 0x8000 ? -1.0f : 1.0f);
  }

  static Short nearest(float value) {
    if (std::isnan(value)) return {kNan};
    int bits = kInfinity;
    if (std::abs(value) < std::ldexp(1.0, kMaxExponent + 1)) {
      const int exponent =
          value == 0 ? 1 - kMaxExponent : std::max(std::ilogb(value), 1 - kMaxExponent);
      const double units = std::ldexp(std::abs(double{value}), fraction_bits - exponent);
      bits = ((exponent + kMaxExponent - 1) << fraction_bits) +
             static_cast<int>(std::nearbyint(units));
    }
    return {static_cast<std::uint16_t>(bits | (std::signbit(value) ? 0x8000 : 0))};
  }
};
using Float16 = Short<10>;
using BFloat16 = Short<7>;

template <int fraction_bits>
Short<fraction_bits> reduced(ReduceOp op, const std::vector<Short<fraction_bits>>& values) {
  std::vector<float> wide;
  for (const auto& value : values) wide.push_back(value.value());
  return Short<fraction_bits>::nearest(reduced(op, wide));
}

// What one element counts with a weight. The oracle's sums of such are reduce_weighted's.
float weighted(float value, double weight) {
  return step(ReduceOp::product, value, static_cast<float>(weight));
}
double weighted(double value, double weight) {
  return step(ReduceOp::product, value, weight);
}
template <typename T>
std::complex<T> weighted(std::complex<T> value, double weight) {
  return {weighted(value.real(), weight), weighted(value.imag(), weight)};
}
template <int fraction_bits>
float weighted(Short<fraction_bits> value, double weight) {
  return weighted(value.value(), weight);
}

template <typename T, typename Sum>
T narrowed(Sum sum) {
  if constexpr (std::same_as<T, Sum>) {
    return sum;
  } else {
    return T::nearest(sum);
  }
}

struct Boolean {
  std::uint8_t bits;
};

Boolean reduced(ReduceOp op, const std::vector<Boolean>& values) {
  const auto set = std::count_if(values.begin(), values.end(), [](Boolean b) { return b.bits; });
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::max:
    case ReduceOp::bit_or:
      return {set > 0};
    case ReduceOp::bit_xor:
      return {set % 2 == 1};
    default:
      return {static_cast<std::size_t>(set) == values.size()};
  }
}

template <std::integral T>
T reduced(ReduceOp op, const std::vector<T>& values) {
  if (op == ReduceOp::avg) {
    T sum = reduced(ReduceOp::sum, values);
    const bool negative = sum < 0;
    // Towards zero: as often as the count fits into the magnitude.
    auto magnitude = static_cast<std::uint64_t>(static_cast<std::int64_t>(sum));
    if (negative) magnitude = 0 - magnitude;
    const std::uint64_t quotient = magnitude / values.size();
    return static_cast<T>(negative ? 0 - quotient : quotient);
  }
  return std::accumulate(values.begin() + 1, values.end(), values[0], [&](T a, T b) {
    // Modulo 2^64, and so modulo any smaller power of two.
    const auto x = static_cast<std::uint64_t>(static_cast<std::int64_t>(a));
    const auto y = static_cast<std::uint64_t>(static_cast<std::int64_t>(b));
    switch (op) {
      case ReduceOp::sum:
        return static_cast<T>(x + y);
      case ReduceOp::product:
        return static_cast<T>(x * y);
      case ReduceOp::min:
        return std::min(a, b);
      case ReduceOp::max:
        return std::max(a, b);
      case ReduceOp::bit_and:
        return static_cast<T>(x & y);
      case ReduceOp::bit_or:
        return static_cast<T>(x | y);
      default:
        return static_cast<T>(x ^ y);
    }
  });
}

// Calls visitor with a value of the C++ type that stands for `type`.
template <typename Visitor>
void visit_type(DataType type, Visitor&& visitor) {
  switch (type) {
    case DataType::float32:
      return visitor(float{});
    case DataType::float64:
      return visitor(double{});
    case DataType::float16:
      return visitor(Float16{});
    case DataType::bfloat16:
      return visitor(BFloat16{});
    case DataType::int8:
      return visitor(std::int8_t{});
    case DataType::uint8:
      return visitor(std::uint8_t{});
    case DataType::int16:
      return visitor(std::int16_t{});
    case DataType::int32:
      return visitor(std::int32_t{});
    case DataType::int64:
      return visitor(std::int64_t{});
    case DataType::boolean:
      return visitor(Boolean{});
    case DataType::complex64:
      return visitor(std::complex<float>{});
    case DataType::complex128:
      return visitor(std::complex<double>{});
    case DataType::byte:
      FAIL() << "not reducible";
  }
}

template <typename T>
constexpr bool kFloating = std::is_floating_point_v<T>;
template <typename T>
constexpr bool kComplex = false;
template <typename T>
constexpr bool kComplex<std::complex<T>> = true;
template <typename T>
constexpr bool kShort = false;
template <int fraction_bits>
constexpr bool kShort<Short<fraction_bits>> = true;

// Moderate numbers, zeros and infinities of both signs, NaNs, subnormals and the extremes.
template <typename T>
T random_value(std::mt19937_64& random) {
  if constexpr (kComplex<T>) {
    using Part = typename T::value_type;
    const Part real = random_value<Part>(random);
    return T(real, random_value<Part>(random));
  }
  const auto any_bits = [&] {
    const std::uint64_t bits = random();
    T value;
    std::memcpy(static_cast<void*>(&value), &bits, std::min(sizeof(value), sizeof(bits)));
    return value;
  };
  if constexpr (kShort<T>) {
    return random() % 4 == 0 ? any_bits() : T::nearest(random_value<float>(random));
  } else if constexpr (kFloating<T>) {
    using Limits = std::numeric_limits<T>;
    const T sign = random() % 2 == 0 ? T{1} : T{-1};
    switch (random() % 32) {
      case 0:
        return sign * 0;
      case 1:
        return sign * Limits::infinity();
      case 2:
        return sign * Limits::max();
      case 3:
        return sign * Limits::denorm_min() * static_cast<T>(random() % 1000);
      case 4:
      case 5:
        return any_bits();
      case 6:
        return std::copysign(Limits::quiet_NaN(), sign);
      default:
        return static_cast<T>(std::normal_distribution<double>(0, 3)(random));
    }
  } else {
    return random() % 4 == 0 ? T{} : any_bits();
  }
}

template <typename T>
std::vector<std::vector<T>> random_sources(std::size_t sources, std::size_t count) {
  std::mt19937_64 random(sources * 1000 + count);
  std::vector<std::vector<T>> result(sources);
  for (auto& source : result) {
    std::generate_n(std::back_inserter(source), count, [&] { return random_value<T>(random); });
  }
  return result;
}

template <typename T>
std::vector<T> oracle(ReduceOp op, const std::vector<std::vector<T>>& sources) {
  std::vector<T> result;
  std::vector<T> values(sources.size());
  for (std::size_t i = 0; i < sources[0].size(); ++i) {
    for (std::size_t k = 0; k < sources.size(); ++k) values[k] = sources[k][i];
    result.push_back(reduced(op, values));
  }
  return result;
}

using Bytes = std::vector<std::uint8_t>;

template <typename T>
Bytes bytes_of(const std::vector<T>& elements) {
  Bytes bytes(elements.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), elements.data(), bytes.size());
  return bytes;
}

template <typename T>
std::vector<Bytes> bytes_of(const std::vector<std::vector<T>>& sources) {
  std::vector<Bytes> bytes;
  for (const auto& source : sources) bytes.push_back(bytes_of(source));
  return bytes;
}

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
void expect_reduces(ReduceFunction function, DataType type, ReduceOp op,
                    const std::vector<Bytes>& sources, std::size_t destinations, bool in_place,
                    std::size_t shift, const Bytes& expected) {
  const auto where = [&] {
    std::ostringstream text;
    text << name(type) << ' ' << name(op) << ", variant "
         << std::ranges::find(kernel_variants(), function, &Kernels::reduce) -
                kernel_variants().begin()
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

  function(type, op, from, to, expected.size() / element_size(type));

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
  for (const auto& [variant, _] : kernel_variants()) {
    for (const std::size_t shift : {std::size_t{0}, std::size_t{1}, element_size(type)}) {
      for (const std::size_t destinations : {std::size_t{1}, std::size_t{2}, sources.size()}) {
        expect_reduces(variant, type, op, sources, destinations, false, shift, expected);
        if (destinations <= sources.size()) {
          expect_reduces(variant, type, op, sources, destinations, true, shift, expected);
        }
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

class Reduction : public testing::TestWithParam<std::pair<DataType, ReduceOp>> {};

TEST_P(Reduction, IsTheOraclesBitForBit) {
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

class WeightedSum : public testing::TestWithParam<DataType> {};

TEST_P(WeightedSum, IsTheOraclesBitForBit) {
  const double all_weights[] = {0.25, 1.0 / 3, 1e-3, 0.5, 7};
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
            expected.push_back(narrowed<T>(reduced(ReduceOp::sum, parts)));
          }
          for (const auto& [_, variant] : kernel_variants()) {
            auto copies = sources;
            std::vector<const void*> from;
            std::vector<void*> to;
            for (auto& copy : copies) from.push_back(to.emplace_back(copy.data()));
            variant(GetParam(), from, weights, to, count);
            for (const auto& copy : copies) ASSERT_EQ(bytes_of(copy), bytes_of(expected));
          }
        }
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Kernels, WeightedSum,
                         testing::Values(DataType::float32, DataType::float64, DataType::float16,
                                         DataType::bfloat16, DataType::complex64,
                                         DataType::complex128),
                         [](const auto& each) { return std::string(name(each.param)); });

TEST(Kernels, WhatIsReducible) {
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

TEST_P(ShortPatterns, AllPassAndMeetEachOther) {
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
        for (const auto& [variant, _] : kernel_variants()) {
          expect_reduces(variant, GetParam(), op, {bytes_of(all)}, 1, false, 0,
                         bytes_of(canonical));
        }
        for (const auto& partner : partners) {
          const std::vector<std::vector<T>> sources = {all, partner};
          const Bytes expected = bytes_of(oracle(op, sources));
          for (const auto& [variant, _] : kernel_variants()) {
            expect_reduces(variant, GetParam(), op, bytes_of(sources), 2, true, 0, expected);
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

TEST(Kernels, Float16AtItsEnds) {
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

TEST(Kernels, OfEqualZerosTheFirstIsKept) {
  for (const ReduceOp op : {ReduceOp::min, ReduceOp::max}) {
    const auto result = run<float>(DataType::float32, op, {{0.0f, -0.0f}, {-0.0f, 0.0f}});
    EXPECT_FALSE(std::signbit(result[0])) << name(op);
    EXPECT_TRUE(std::signbit(result[1])) << name(op);
  }
}

TEST(Kernels, NanIsCanonicalFromEveryPosition) {
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
