#include <ATen/ops/from_blob.h>

#include <paceline/datasets.h>

#include <memory>

#include "data/idx.h"

namespace paceline::data {
namespace {

at::ScalarType scalar_type(IdxType type) {
  switch (type) {
    case IdxType::uint8:
      return at::kByte;
    case IdxType::int8:
      return at::kChar;
    case IdxType::int16:
      return at::kShort;
    case IdxType::int32:
      return at::kInt;
    case IdxType::float32:
      return at::kFloat;
    case IdxType::float64:
      return at::kDouble;
  }
  return at::ScalarType::Undefined;
}

}  // namespace

at::Tensor read_idx(const std::filesystem::path& path) {
  auto array = std::make_shared<IdxArray>(read_idx_file(path));
  return at::from_blob(
      array->bytes.data(), array->shape, [array](void*) {},  // the tensor keeps it alive
      at::TensorOptions(scalar_type(array->type)));
}

}  // namespace paceline::data
