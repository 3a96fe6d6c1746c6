#include "node/types.h"

namespace paceline::node {

// The values of both enumerations cross process borders, where a damaged peer may have written
// anything: the names answer for every value.

std::size_t element_size(DataType type) {
  switch (type) {
    case DataType::byte:
      return 1;
    case DataType::bfloat16:
      return 2;
    case DataType::float32:
      return 4;
    case DataType::float64:
    case DataType::int64:
      return 8;
  }
  return 1;
}

const char* name(DataType type) {
  switch (type) {
    case DataType::byte:
      return "bytes";
    case DataType::float32:
      return "float32";
    case DataType::float64:
      return "float64";
    case DataType::bfloat16:
      return "bfloat16";
    case DataType::int64:
      return "int64";
  }
  return "elements of an unknown type";
}

const char* name(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return "SUM";
    case ReduceOp::avg:
      return "AVG";
    case ReduceOp::min:
      return "MIN";
    case ReduceOp::max:
      return "MAX";
  }
  return "an unknown reduction";
}

}  // namespace paceline::node
