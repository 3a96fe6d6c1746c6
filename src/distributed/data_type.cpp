#include "distributed/data_type.h"

namespace paceline::distributed {

std::optional<shm::DataType> data_type_of(at::ScalarType type) {
  using shm::DataType;
  switch (type) {
    case at::kFloat:
      return DataType::float32;
    case at::kDouble:
      return DataType::float64;
    case at::kHalf:
      return DataType::float16;
    case at::kBFloat16:
      return DataType::bfloat16;
    case at::kChar:
      return DataType::int8;
    case at::kByte:
      return DataType::uint8;
    case at::kShort:
      return DataType::int16;
    case at::kInt:
      return DataType::int32;
    case at::kLong:
      return DataType::int64;
    case at::kBool:
      return DataType::boolean;
    case at::kComplexFloat:
      return DataType::complex64;
    case at::kComplexDouble:
      return DataType::complex128;
    default:
      return std::nullopt;
  }
}

shm::DataType moved_type_of(at::ScalarType type) {
  using shm::DataType;
  switch (type) {
    case at::kUInt16:
      return DataType::uint16;
    case at::kUInt32:
      return DataType::uint32;
    case at::kUInt64:
      return DataType::uint64;
    case at::kComplexHalf:
      return DataType::complex32;
    case at::kFloat8_e5m2:
      return DataType::float8_e5m2;
    case at::kFloat8_e4m3fn:
      return DataType::float8_e4m3fn;
    case at::kFloat8_e5m2fnuz:
      return DataType::float8_e5m2fnuz;
    case at::kFloat8_e4m3fnuz:
      return DataType::float8_e4m3fnuz;
    case at::kFloat8_e8m0fnu:
      return DataType::float8_e8m0fnu;
    default:
      return data_type_of(type).value_or(DataType::byte);
  }
}

}  // namespace paceline::distributed
