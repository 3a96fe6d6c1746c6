#pragma once

#include <cstddef>
#include <cstdint>

namespace paceline::node {

// The element types that ranks tell each other. Reductions know the first four; collectives that
// only move data carry the type so that ranks which disagree about it are found out, and take
// anything else as bytes.
enum class DataType : std::uint8_t {
  float32,
  float64,
  bfloat16,
  int64,
  float16,
  int8,
  uint8,
  int16,
  int32,
  boolean,
  complex64,
  complex128,
  byte
};
constexpr bool is_reducible(DataType type) {
  return type <= DataType::int64;
}

// avg is defined for floating types only.
enum class ReduceOp : std::uint8_t { sum, avg, min, max };

std::size_t element_size(DataType type);
const char* name(DataType type);
const char* name(ReduceOp op);

}  // namespace paceline::node
