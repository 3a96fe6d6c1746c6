#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstring>
#include <vector>

#include "shm/kernels/types.h"

namespace paceline::test {

// Elements of every type, and the expected results of their reductions, computed in double and in
// 64-bit integers, independently of the library.
using Value = std::complex<double>;

inline constexpr shm::DataType kAllTypes[] = {
    shm::DataType::float32,  shm::DataType::float64,   shm::DataType::float16,
    shm::DataType::bfloat16, shm::DataType::int8,      shm::DataType::uint8,
    shm::DataType::int16,    shm::DataType::int32,     shm::DataType::int64,
    shm::DataType::boolean,  shm::DataType::complex64, shm::DataType::complex128};
inline constexpr shm::ReduceOp kAllOps[] = {
    shm::ReduceOp::sum, shm::ReduceOp::avg,     shm::ReduceOp::product, shm::ReduceOp::min,
    shm::ReduceOp::max, shm::ReduceOp::bit_and, shm::ReduceOp::bit_or,  shm::ReduceOp::bit_xor};

// A 16-bit float with a fraction of `mantissa` bits; subnormals become zero.
inline std::uint16_t to_16_bits(double value, int mantissa) {
  if (value == 0) return 0;
  const int bias = (1 << (14 - mantissa)) - 1;
  int exponent = 0;
  const double fraction = std::frexp(std::abs(value), &exponent);
  // Carries into the exponent if the fraction rounds up to one.
  const auto digits = static_cast<std::int64_t>(std::nearbyint(std::ldexp(fraction, mantissa + 1)));
  const std::int64_t bits = (static_cast<std::int64_t>(exponent - 2 + bias) << mantissa) + digits;
  return static_cast<std::uint16_t>((value < 0 ? 0x8000 : 0) | bits);
}
inline double from_16_bits(std::uint16_t bits, int mantissa) {
  const int bias = (1 << (14 - mantissa)) - 1;
  const int exponent = (bits & 0x7fff) >> mantissa;
  const int digits = (bits & ((1 << mantissa) - 1)) | (exponent > 0 ? 1 << mantissa : 0);
  const double value = std::ldexp(digits, std::max(exponent, 1) - bias - mantissa);
  return bits & 0x8000 ? -value : value;
}

template <typename T>
void put_as(void* at, std::size_t i, T value) {
  std::memcpy(static_cast<std::byte*>(at) + i * sizeof(T), &value, sizeof(T));
}
template <typename T>
T get_as(const void* at, std::size_t i) {
  T value;
  std::memcpy(&value, static_cast<const std::byte*>(at) + i * sizeof(T), sizeof(T));
  return value;
}

// Integers wrap; non-zero is true.
inline void put(shm::DataType type, void* at, std::size_t i, Value value) {
  using shm::DataType;
  const auto integer = static_cast<std::uint64_t>(std::llround(value.real()));
  switch (type) {
    case DataType::float32:
      return put_as(at, i, static_cast<float>(value.real()));
    case DataType::float64:
      return put_as(at, i, value.real());
    case DataType::float16:
      return put_as(at, i, to_16_bits(value.real(), 10));
    case DataType::bfloat16:
      return put_as(at, i, to_16_bits(value.real(), 7));
    case DataType::int8:
    case DataType::uint8:
    case DataType::byte:
      return put_as(at, i, static_cast<std::uint8_t>(integer));
    case DataType::int16:
      return put_as(at, i, static_cast<std::uint16_t>(integer));
    case DataType::int32:
      return put_as(at, i, static_cast<std::uint32_t>(integer));
    case DataType::int64:
      return put_as(at, i, integer);
    case DataType::boolean:
      return put_as(at, i, static_cast<std::uint8_t>(integer != 0));
    case DataType::complex64:
      return put_as(at, i, std::complex<float>(value));
    case DataType::complex128:
      return put_as(at, i, value);
    default:
      return;
  }
}

inline Value get(shm::DataType type, const void* at, std::size_t i) {
  using shm::DataType;
  switch (type) {
    case DataType::float32:
      return get_as<float>(at, i);
    case DataType::float64:
      return get_as<double>(at, i);
    case DataType::float16:
      return from_16_bits(get_as<std::uint16_t>(at, i), 10);
    case DataType::bfloat16:
      return from_16_bits(get_as<std::uint16_t>(at, i), 7);
    case DataType::int8:
      return get_as<std::int8_t>(at, i);
    case DataType::uint8:
    case DataType::byte:
    case DataType::boolean:
      return get_as<std::uint8_t>(at, i);
    case DataType::int16:
      return get_as<std::int16_t>(at, i);
    case DataType::int32:
      return get_as<std::int32_t>(at, i);
    case DataType::int64:
      return static_cast<double>(get_as<std::int64_t>(at, i));
    case DataType::complex64:
      return Value(get_as<std::complex<float>>(at, i));
    case DataType::complex128:
      return get_as<Value>(at, i);
    default:
      return 0;
  }
}

// The value rounded to the type.
inline Value held(shm::DataType type, Value value) {
  std::byte cell[16];
  put(type, cell, 0, value);
  return get(type, cell, 0);
}

// The tolerance for a reduction of values up to `magnitude`.
inline double tolerance(shm::DataType type, double magnitude) {
  using shm::DataType;
  switch (type) {
    case DataType::float32:
    case DataType::complex64:
      return magnitude * 1e-6;
    case DataType::float64:
    case DataType::complex128:
      return magnitude * 1e-14;
    case DataType::float16:
      return magnitude / 1000;
    case DataType::bfloat16:
      return magnitude / 200;
    default:
      return 0;
  }
}

// Reduces values of the type, in this order; exact while they and the results stay below 2^53.
inline Value reduced(shm::DataType type, shm::ReduceOp op, const std::vector<Value>& values) {
  using shm::ReduceOp;
  const auto bits = [](Value value) { return std::llround(value.real()); };
  Value result = values[0];
  for (std::size_t i = 1; i < values.size(); ++i) {
    const Value next = values[i];
    switch (op) {
      case ReduceOp::sum:
      case ReduceOp::avg:
        result += next;
        break;
      case ReduceOp::product:
        result *= next;
        break;
      case ReduceOp::min:
        result = std::min(result.real(), next.real());
        break;
      case ReduceOp::max:
        result = std::max(result.real(), next.real());
        break;
      case ReduceOp::bit_and:
        result = static_cast<double>(bits(result) & bits(next));
        break;
      case ReduceOp::bit_or:
        result = static_cast<double>(bits(result) | bits(next));
        break;
      case ReduceOp::bit_xor:
        result = static_cast<double>(bits(result) ^ bits(next));
        break;
    }
  }
  if (op == ReduceOp::avg) {
    const bool integer = type >= shm::DataType::int8 && type <= shm::DataType::int64;
    if (integer) result = held(type, result);
    result /= static_cast<double>(values.size());
    if (integer) result = std::trunc(result.real());
  }
  return held(type, result);
}

}  // namespace paceline::test
