#pragma once

#include <gtest/gtest.h>
#include <torch/types.h>

#include <string>
#include <utility>
#include <vector>

namespace paceline::test {

// As files/make_safetensors and files/make_pt name them; complex128 is in .pt files only.
inline const std::vector<std::pair<std::string, at::ScalarType>> kPythonsTypes{
    {"bool", at::kBool},
    {"uint8", at::kByte},
    {"int8", at::kChar},
    {"int16", at::kShort},
    {"int32", at::kInt},
    {"int64", at::kLong},
    {"uint16", at::kUInt16},
    {"uint32", at::kUInt32},
    {"uint64", at::kUInt64},
    {"float16", at::kHalf},
    {"bfloat16", at::kBFloat16},
    {"float32", at::kFloat},
    {"float64", at::kDouble},
    {"complex64", at::kComplexFloat},
    {"float8_e4m3fn", at::kFloat8_e4m3fn},
    {"float8_e5m2", at::kFloat8_e5m2},
};

inline at::Tensor numbers(at::ScalarType type) {
  return at::arange(6).reshape({2, 3}).to(type);
}

inline std::string bytes_of(const at::Tensor& tensor) {
  const at::Tensor dense = tensor.detach().contiguous();
  return {static_cast<const char*>(dense.const_data_ptr()), dense.nbytes()};
}

inline void expect_same(const at::Tensor& got, const at::Tensor& expected,
                        const std::string& what) {
  EXPECT_EQ(got.scalar_type(), expected.scalar_type()) << what;
  EXPECT_EQ(got.sizes(), expected.sizes()) << what;
  EXPECT_EQ(bytes_of(got), bytes_of(expected)) << what;
}

}  // namespace paceline::test
