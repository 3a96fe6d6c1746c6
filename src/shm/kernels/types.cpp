#include "shm/kernels/types.h"

#include <iterator>

namespace paceline::shm {

namespace {

struct TypeFacts {
  const char* name;
  std::size_t size;
};
constexpr TypeFacts kTypes[] = {{"float32", 4},
                                {"float64", 8},
                                {"float16", 2},
                                {"bfloat16", 2},
                                {"int8", 1},
                                {"uint8", 1},
                                {"int16", 2},
                                {"int32", 4},
                                {"int64", 8},
                                {"bool", 1},
                                {"complex64", 8},
                                {"complex128", 16},
                                {"bytes", 1},
                                {"uint16", 2},
                                {"uint32", 4},
                                {"uint64", 8},
                                {"complex32", 4},
                                {"float8_e5m2", 1},
                                {"float8_e4m3fn", 1},
                                {"float8_e5m2fnuz", 1},
                                {"float8_e4m3fnuz", 1},
                                {"float8_e8m0fnu", 1}};
static_assert(std::size(kTypes) == static_cast<std::size_t>(DataType::float8_e8m0fnu) + 1);

// The values of both enumerations cross process borders, where a damaged peer may have written
// anything: the names answer for every value.
TypeFacts facts_of(DataType type) {
  const auto index = static_cast<std::size_t>(type);
  return index < std::size(kTypes) ? kTypes[index] : TypeFacts{"elements of an unknown type", 1};
}

}  // namespace

std::size_t element_size(DataType type) {
  return facts_of(type).size;
}

const char* name(DataType type) {
  return facts_of(type).name;
}

const char* name(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return "SUM";
    case ReduceOp::avg:
      return "AVG";
    case ReduceOp::product:
      return "PRODUCT";
    case ReduceOp::min:
      return "MIN";
    case ReduceOp::max:
      return "MAX";
    case ReduceOp::bit_and:
      return "BAND";
    case ReduceOp::bit_or:
      return "BOR";
    case ReduceOp::bit_xor:
      return "BXOR";
  }
  return "an unknown reduction";
}

}  // namespace paceline::shm
