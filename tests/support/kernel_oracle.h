#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "shm/kernels/types.h"

// What the kernels should give, computed one element and one step at a time.
namespace paceline::test::exact {

using shm::DataType;
using shm::is_reducible;
using shm::ReduceOp;

inline constexpr ReduceOp kOps[] = {ReduceOp::sum,    ReduceOp::avg,    ReduceOp::product,
                                    ReduceOp::min,    ReduceOp::max,    ReduceOp::bit_and,
                                    ReduceOp::bit_or, ReduceOp::bit_xor};
inline constexpr std::size_t kCounts[] = {0,  1,  2,  3,  7,  8,  15,  16,  17,
                                          31, 32, 33, 63, 64, 65, 127, 1000};

inline std::vector<std::pair<DataType, ReduceOp>> reducible_pairs() {
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

template <typename T>
T canonical(T value) {
  return std::isnan(value) ? std::numeric_limits<T>::quiet_NaN() : value;
}

// Twice the digits and two more: rounded to double first, a float32 result is still correct.
inline float step(ReduceOp op, float a, float b) {
  const double x = a;
  const double y = b;
  if (op == ReduceOp::sum) return static_cast<float>(x + y);
  if (op == ReduceOp::product) return static_cast<float>(x * y);
  if (op == ReduceOp::avg) return static_cast<float>(x / y);
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<float>::quiet_NaN();
  return op == ReduceOp::min ? std::min(a, b) : std::max(a, b);
}

// volatile: nothing here may be contracted to a fused multiply-add.
inline double step(ReduceOp op, double a, double b) {
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
inline ReduceOp accumulation(ReduceOp op) {
  return op == ReduceOp::avg ? ReduceOp::sum : op;
}

// The root of a binary tree over `nodes`, level by level. An empty node leaves the other as it is.
template <typename T, typename Combine>
T root_of(std::vector<std::optional<T>> nodes, Combine combine) {
  while (nodes.size() > 1) {
    std::vector<std::optional<T>> above;
    for (std::size_t i = 0; i < nodes.size(); i += 2) {
      const auto& left = nodes[i];
      const auto right = i + 1 < nodes.size() ? nodes[i + 1] : std::nullopt;
      above.push_back(left && right ? combine(*left, *right) : left ? left : right);
    }
    nodes = above;
  }
  return *nodes[0];
}
template <typename T, typename Combine>
T root_of(const std::vector<T>& leaves, Combine combine) {
  return root_of(std::vector<std::optional<T>>(leaves.begin(), leaves.end()), combine);
}

template <typename T>
T reduced_floating(ReduceOp op, const std::vector<T>& values) {
  const T result =
      root_of(values, [&](T left, T right) { return step(accumulation(op), left, right); });
  return op == ReduceOp::avg ? step(op, result, static_cast<T>(values.size())) : result;
}

inline float reduced(ReduceOp op, const std::vector<float>& values) {
  return canonical(reduced_floating(op, values));
}
inline double reduced(ReduceOp op, const std::vector<double>& values) {
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
  const auto times = [](T a, T b) { return step(ReduceOp::product, a, b); };
  const auto product = root_of(values, [&](const auto& x, const auto& y) {
    return std::complex<T>(
        step(ReduceOp::sum, times(x.real(), y.real()), -times(x.imag(), y.imag())),
        step(ReduceOp::sum, times(x.real(), y.imag()), times(x.imag(), y.real())));
  });
  return {canonical(product.real()), canonical(product.imag())};
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

// What one element counts with a weight.
inline float weighted(float value, double weight) {
  return step(ReduceOp::product, value, static_cast<float>(weight));
}
inline double weighted(double value, double weight) {
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

template <std::floating_point T>
T divided(T sum, double divisor) {
  return canonical(step(ReduceOp::avg, sum, static_cast<T>(divisor)));
}
template <typename T>
std::complex<T> divided(std::complex<T> sum, double divisor) {
  return {divided(sum.real(), divisor), divided(sum.imag(), divisor)};
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

inline Boolean reduced(ReduceOp op, const std::vector<Boolean>& values) {
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
    default:
      FAIL() << "not reducible";
  }
}

template <typename T>
constexpr bool kFloating = std::is_floating_point_v<T>;
template <typename T>
constexpr bool kComplex = false;
template <typename T>
inline constexpr bool kComplex<std::complex<T>> = true;
template <typename T>
constexpr bool kShort = false;
template <int fraction_bits>
inline constexpr bool kShort<Short<fraction_bits>> = true;

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

}  // namespace paceline::test::exact
