#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <utility>

namespace paceline::data {

// Samples of a data set that is held as bytes.
struct ByteSamples {
  const char* dataset;  // its name, for errors
  at::Tensor images;    // uint8, (size, ...); each image contiguous
  at::Tensor labels;    // uint8, (size)

  // The images of `indices`, float32 in [0, 1] of shape (n, `channels`, `side`, `side`), and their
  // labels as int64. Throws UsageError for an index out of range.
  std::pair<at::Tensor, at::Tensor> gather(std::span<const std::int64_t> indices,
                                           std::int64_t channels, std::int64_t side) const;
};

}  // namespace paceline::data
