#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

// What the transforms have in common.
namespace paceline::data::transforms {

struct ImageSize {
  std::int64_t height;
  std::int64_t width;
};

// Throws UsageError, which names the function, unless the tensor has `least` dimensions.
ImageSize size_of(const char* function, const at::Tensor& image, std::int64_t least = 2);

// Of {height, width}, or of one number for both. Throws UsageError unless they are positive.
ImageSize target_size(const char* function, at::IntArrayRef size);

}  // namespace paceline::data::transforms
