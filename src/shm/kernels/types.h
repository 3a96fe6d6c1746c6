#pragma once

#include <cstddef>
#include <cstdint>

namespace paceline::shm {

// The element types in fingerprints, so that ranks detect a disagreement. Those from `byte` on are
// moved but never reduced; `byte` is any type without a name here.
enum class DataType : std::uint8_t {
  float32,
  float64,
  float16,
  bfloat16,
  int8,
  uint8,
  int16,
  int32,
  int64,
  boolean,
  complex64,
  complex128,
  byte,
  uint16,
  uint32,
  uint64,
  complex32,
  float8_e5m2,
  float8_e4m3fn,
  float8_e5m2fnuz,
  float8_e4m3fnuz,
  float8_e8m0fnu
};

enum class ReduceOp : std::uint8_t { sum, avg, product, min, max, bit_and, bit_or, bit_xor };

// Also false for values outside the enumerations.
constexpr bool is_reducible(DataType type, ReduceOp op) {
  const bool floating = type <= DataType::bfloat16;
  const bool complex = type == DataType::complex64 || type == DataType::complex128;
  if (type >= DataType::byte) return false;
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::product:
      return true;
    case ReduceOp::avg:
      return type != DataType::boolean;
    case ReduceOp::min:
    case ReduceOp::max:
      return !complex;
    case ReduceOp::bit_and:
    case ReduceOp::bit_or:
    case ReduceOp::bit_xor:
      return !floating && !complex;
  }
  return false;
}

// The type in which reductions of `type` accumulate.
constexpr DataType accumulation_type(DataType type) {
  const bool half = type == DataType::float16 || type == DataType::bfloat16;
  return half ? DataType::float32 : type;
}

std::size_t element_size(DataType type);
const char* name(DataType type);
const char* name(ReduceOp op);

}  // namespace paceline::shm
