#include <paceline/transforms.h>

#include <ATen/TensorOperators.h>
#include <ATen/ops/_upsample_bilinear2d_aa.h>
#include <ATen/ops/flip.h>
#include <ATen/ops/pad.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/upsample_bilinear2d.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <paceline/error.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "data/image_shape.h"

namespace paceline::data::transforms {
namespace {

// As Python's round(value / 2).
std::int64_t half_to_even(std::int64_t value) {
  const std::int64_t half = value / 2;
  return value % 2 != 0 && half % 2 != 0 ? half + 1 : half;
}

// As Pillow's and torchvision's; the length of the longer side is rounded down.
ImageSize resized(const ImageSize& from, at::IntArrayRef size) {
  const ImageSize to = target_size("resize", size);
  if (size.size() == 2) return to;
  const auto scaled = [&](std::int64_t side, std::int64_t shorter) {
    return static_cast<std::int64_t>(static_cast<double>(to.height * side) /
                                     static_cast<double>(shorter));
  };
  if (from.width <= from.height) return {scaled(from.height, from.width), to.width};
  return {to.height, scaled(from.width, from.height)};
}

// (images, channels, height, width), as LibTorch's functions want them.
at::Tensor four_dimensional(const at::Tensor& image) {
  const std::int64_t channels = image.dim() > 2 ? image.size(-3) : 1;
  return image.reshape({-1, channels, image.size(-2), image.size(-1)});
}

// `result`, of four dimensions, with the first dimensions of `image`.
at::Tensor like(const at::Tensor& image, const at::Tensor& result) {
  std::vector<std::int64_t> shape = image.sizes().vec();
  shape[shape.size() - 2] = result.size(-2);
  shape[shape.size() - 1] = result.size(-1);
  return result.reshape(shape);
}

// {left, right, top, bottom}, as LibTorch wants them.
std::vector<std::int64_t> padding_of(at::IntArrayRef padding) {
  std::vector<std::int64_t> sides(4, padding.empty() ? 0 : padding[0]);
  if (padding.size() == 2) sides = {padding[0], padding[0], padding[1], padding[1]};
  if (padding.size() == 4) sides = {padding[0], padding[2], padding[1], padding[3]};
  if (padding.size() == 3 || padding.size() > 4 || *std::ranges::min_element(sides) < 0) {
    throw UsageError(
        fmt::format("pad: the padding is {{{}}}; it must be 1, 2 or 4 numbers that "
                    "are not negative",
                    fmt::join(padding, ", ")));
  }
  return sides;
}

const char* name_of(PaddingMode mode) {
  switch (mode) {
    case PaddingMode::constant:
      return "constant";
    case PaddingMode::edge:
      return "replicate";
    case PaddingMode::reflect:
      return "reflect";
  }
  throw UsageError(fmt::format("pad: there is no mode {}", static_cast<int>(mode)));
}

// One number of each channel, to broadcast.
at::Tensor by_channel(const char* name, const at::Tensor& image, at::ArrayRef<double> values) {
  const auto count = static_cast<std::int64_t>(values.size());
  if (count != 1 && count != image.size(-3)) {
    throw UsageError(fmt::format("normalize: {} has {} numbers, and the image has {} channels",
                                 name, count, image.size(-3)));
  }
  return at::tensor(values, image.options()).view({-1, 1, 1});
}

double greatest(at::ScalarType type) {
  switch (type) {
    case at::kBool:
      return 1;
    case at::kByte:
      return std::numeric_limits<std::uint8_t>::max();
    case at::kChar:
      return std::numeric_limits<std::int8_t>::max();
    case at::kShort:
      return std::numeric_limits<std::int16_t>::max();
    case at::kUInt16:
      return std::numeric_limits<std::uint16_t>::max();
    case at::kInt:
      return std::numeric_limits<std::int32_t>::max();
    default:
      throw UsageError(fmt::format("to_float: an image of {} has no scale", c10::toString(type)));
  }
}

}  // namespace

ImageSize size_of(const char* function, const at::Tensor& image, std::int64_t least) {
  if (image.defined() && image.dim() >= least && image.size(-1) > 0 && image.size(-2) > 0) {
    return {image.size(-2), image.size(-1)};
  }
  throw UsageError(
      fmt::format("{}: the tensor has shape {{{}}}; an image has shape (..., {}height, width)",
                  function, fmt::join(image.defined() ? image.sizes() : at::IntArrayRef(), ", "),
                  least > 2 ? "channels, " : ""));
}

ImageSize target_size(const char* function, at::IntArrayRef size) {
  if ((size.size() == 1 || size.size() == 2) && size.front() >= 1 && size.back() >= 1) {
    return {size.front(), size.back()};
  }
  throw UsageError(fmt::format("{}: the size is {{{}}}; it must be 1 or 2 numbers, at least 1",
                               function, fmt::join(size, ", ")));
}

at::Tensor hflip(const at::Tensor& image) {
  size_of("hflip", image);
  return at::flip(image, {-1});
}

at::Tensor vflip(const at::Tensor& image) {
  size_of("vflip", image);
  return at::flip(image, {-2});
}

at::Tensor crop(const at::Tensor& image, std::int64_t top, std::int64_t left, std::int64_t height,
                std::int64_t width) {
  const ImageSize size = size_of("crop", image);
  const std::int64_t target[] = {height, width};
  target_size("crop", target);
  const std::int64_t outside[] = {std::max<std::int64_t>(-left, 0), std::max<std::int64_t>(-top, 0),
                                  std::max<std::int64_t>(left + width - size.width, 0),
                                  std::max<std::int64_t>(top + height - size.height, 0)};
  const bool inside = std::ranges::all_of(outside, [](std::int64_t side) { return side == 0; });
  const at::Tensor padded = inside ? image : transforms::pad(image, outside);
  return padded.narrow(-2, top + outside[1], height).narrow(-1, left + outside[0], width);
}

at::Tensor center_crop(const at::Tensor& image, at::IntArrayRef size) {
  const ImageSize target = target_size("center_crop", size);
  const ImageSize from = size_of("center_crop", image);
  const std::int64_t rows = std::max<std::int64_t>(target.height - from.height, 0);
  const std::int64_t columns = std::max<std::int64_t>(target.width - from.width, 0);
  const std::int64_t border[] = {columns / 2, rows / 2, (columns + 1) / 2, (rows + 1) / 2};
  const at::Tensor padded = rows + columns > 0 ? transforms::pad(image, border) : image;
  return crop(padded, half_to_even(padded.size(-2) - target.height),
              half_to_even(padded.size(-1) - target.width), target.height, target.width);
}

at::Tensor pad(const at::Tensor& image, at::IntArrayRef padding, double fill, PaddingMode mode) {
  const ImageSize size = size_of("pad", image);
  const std::vector<std::int64_t> sides = padding_of(padding);
  if (mode == PaddingMode::reflect &&
      (std::max(sides[0], sides[1]) >= size.width || std::max(sides[2], sides[3]) >= size.height)) {
    throw UsageError("pad: the padding must be smaller than the image to reflect it");
  }
  const char* const name = name_of(mode);
  if (mode == PaddingMode::constant) return at::pad(image, sides, name, fill);
  // Not all types can be reflected.
  const at::Tensor converted = image.is_floating_point() ? image : image.to(at::kDouble);
  return like(image, at::pad(four_dimensional(converted), sides, name)).to(image.scalar_type());
}

at::Tensor resize(const at::Tensor& image, at::IntArrayRef size, bool antialias) {
  const ImageSize from = size_of("resize", image);
  const ImageSize to = resized(from, size);
  if (to.height == from.height && to.width == from.width) return image;
  const at::Tensor converted = image.is_floating_point() ? image : image.to(at::kFloat);
  const std::int64_t shape[] = {to.height, to.width};
  const at::IntArrayRef target(shape);
  const at::Tensor input = four_dimensional(converted);
  at::Tensor result = antialias
                          ? at::_upsample_bilinear2d_aa(input, target, /*align_corners=*/false,
                                                        std::nullopt, std::nullopt)
                          : at::upsample_bilinear2d(input, target, /*align_corners=*/false,
                                                    std::nullopt, std::nullopt);
  if (!image.is_floating_point()) result = result.round_().to(image.scalar_type());
  return like(image, result);
}

at::Tensor normalize(const at::Tensor& image, at::ArrayRef<double> mean, at::ArrayRef<double> std) {
  size_of("normalize", image, 3);
  if (!image.is_floating_point()) {
    throw UsageError(fmt::format("normalize: the image has type {}; call to_float first",
                                 c10::toString(image.scalar_type())));
  }
  if (std::ranges::find(std, 0.0) != std.end()) {
    throw UsageError("normalize: std has a 0, by which nothing can be divided");
  }
  return (image - by_channel("mean", image, mean)).div_(by_channel("std", image, std));
}

at::Tensor to_float(const at::Tensor& image) {
  if (image.is_floating_point()) return image.to(at::kFloat);
  return image.to(at::kFloat).mul_(1 / greatest(image.scalar_type()));
}

}  // namespace paceline::data::transforms
