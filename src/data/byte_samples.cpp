#include "data/byte_samples.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "data/check_index.h"

namespace paceline::data {

std::pair<at::Tensor, at::Tensor> ByteSamples::gather(std::span<const std::int64_t> indices,
                                                      std::int64_t channels,
                                                      std::int64_t side) const {
  const auto count = static_cast<std::int64_t>(indices.size());
  at::Tensor batch = at::empty({count, channels, side, side}, at::TensorOptions(at::kFloat));
  at::Tensor classes = at::empty({count}, at::TensorOptions(at::kLong));
  auto* pixels = batch.mutable_data_ptr<float>();
  auto* label = classes.mutable_data_ptr<std::int64_t>();
  for (const std::int64_t index : indices) {
    check_index(dataset, index, labels.size(0));
    const auto* const image = images.const_data_ptr<std::uint8_t>() + index * images.stride(0);
    pixels = std::transform(image, image + channels * side * side, pixels,
                            [](std::uint8_t pixel) { return static_cast<float>(pixel) / 255.0F; });
    *label++ = labels.const_data_ptr<std::uint8_t>()[index * labels.stride(0)];
  }
  return {std::move(batch), std::move(classes)};
}

}  // namespace paceline::data
