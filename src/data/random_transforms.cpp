#include <ATen/ops/empty.h>
#include <ATen/ops/log.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>

#include <paceline/error.h>
#include <paceline/transforms.h>

#include <algorithm>
#include <cmath>

#include "data/image_shape.h"

namespace paceline::data::transforms {
namespace {

struct Rectangle {
  std::int64_t top;
  std::int64_t left;
  std::int64_t height;
  std::int64_t width;
};

// The draws that torchvision makes, so that the numbers are the same.
std::int64_t draw_below(std::int64_t end, at::Generator& generator) {
  return at::randint(end, {1}, generator, at::kLong).item<std::int64_t>();
}

at::Tensor draw_between(double low, double high, at::Generator& generator) {
  return at::empty({1}, at::TensorOptions(at::kFloat)).uniform_(low, high, generator);
}

void check_range(const char* name, const std::array<double, 2>& range) {
  if (range[0] > 0 && range[0] <= range[1] && std::isfinite(range[1])) return;
  throw UsageError(
      fmt::format("random_resized_crop: {} is {{{}, {}}}; it must be two positive numbers in "
                  "ascending order",
                  name, range[0], range[1]));
}

// The largest in the middle whose sides have an allowed ratio.
Rectangle middle(const ImageSize& size, const std::array<double, 2>& ratio) {
  const auto rounded = [](double value) {
    return static_cast<std::int64_t>(std::nearbyint(value));
  };
  const auto width = static_cast<double>(size.width);
  const auto height = static_cast<double>(size.height);
  ImageSize crop = size;
  if (width / height < ratio[0]) crop.height = rounded(width / ratio[0]);
  if (width / height > ratio[1]) crop.width = rounded(height * ratio[1]);
  return {(size.height - crop.height) / 2, (size.width - crop.width) / 2, crop.height, crop.width};
}

Rectangle draw_rectangle(const ImageSize& size, const RandomResizedCropOptions& options,
                         at::Generator& generator) {
  constexpr int kAttempts = 10;
  const auto log_of = [](double ratio) {
    return at::log(at::tensor(ratio, at::TensorOptions(at::kFloat))).item<double>();
  };
  const double low = log_of(options.ratio[0]);
  const double high = log_of(options.ratio[1]);
  for (int i = 0; i < kAttempts; ++i) {
    const double area = static_cast<double>(size.height * size.width) *
                        draw_between(options.scale[0], options.scale[1], generator).item<double>();
    const double ratio = draw_between(low, high, generator).exp_().item<double>();
    const auto width = static_cast<std::int64_t>(std::nearbyint(std::sqrt(area * ratio)));
    const auto height = static_cast<std::int64_t>(std::nearbyint(std::sqrt(area / ratio)));
    if (width < 1 || width > size.width || height < 1 || height > size.height) continue;
    const std::int64_t top = draw_below(size.height - height + 1, generator);
    const std::int64_t left = draw_below(size.width - width + 1, generator);
    return {top, left, height, width};
  }
  return middle(size, options.ratio);
}

double draw_factor(const char* name, double value, at::Generator& generator) {
  if (!(value >= 0)) {
    throw UsageError(fmt::format("color_jitter: {} is {}; it must not be negative", name, value));
  }
  if (value == 0) return 1;
  return draw_between(std::max(0.0, 1 - value), 1 + value, generator).item<double>();
}

}  // namespace

at::Tensor random_crop(const at::Tensor& image, at::IntArrayRef size, at::IntArrayRef padding,
                       at::Generator& generator, double fill, PaddingMode mode) {
  const ImageSize target = target_size("random_crop", size);
  const at::Tensor padded = padding.empty() ? image : transforms::pad(image, padding, fill, mode);
  const ImageSize from = size_of("random_crop", padded);
  if (from.height < target.height || from.width < target.width) {
    throw UsageError(
        fmt::format("random_crop: the padded image has {} x {} pixels, fewer than the "
                    "crop, {} x {}",
                    from.height, from.width, target.height, target.width));
  }
  // A side that is not cropped takes no number.
  const auto place = [&](std::int64_t room) {
    return room > 0 ? draw_below(room + 1, generator) : 0;
  };
  const std::int64_t top = place(from.height - target.height);
  const std::int64_t left = place(from.width - target.width);
  return crop(padded, top, left, target.height, target.width);
}

at::Tensor random_horizontal_flip(const at::Tensor& image, double p, at::Generator& generator) {
  if (!(p >= 0 && p <= 1)) {
    throw UsageError(fmt::format("random_horizontal_flip: p is {}; it must be from 0 to 1", p));
  }
  const auto drawn = at::rand({1}, generator, at::TensorOptions(at::kFloat)).item<float>();
  return drawn < static_cast<float>(p) ? hflip(image) : image;
}

at::Tensor random_resized_crop(const at::Tensor& image, at::IntArrayRef size,
                               at::Generator& generator, const RandomResizedCropOptions& options) {
  check_range("scale", options.scale);
  check_range("ratio", options.ratio);
  const ImageSize target = target_size("random_resized_crop", size);
  const Rectangle part = draw_rectangle(size_of("random_resized_crop", image), options, generator);
  const std::int64_t shape[] = {target.height, target.width};
  return transforms::resize(crop(image, part.top, part.left, part.height, part.width), shape,
                            options.antialias);
}

at::Tensor color_jitter(const at::Tensor& image, const ColorJitterOptions& options,
                        at::Generator& generator) {
  const at::Tensor order = at::randperm(4, generator, at::TensorOptions(at::kLong));
  const double brightness = draw_factor("brightness", options.brightness, generator);
  const double contrast = draw_factor("contrast", options.contrast, generator);
  const double saturation = draw_factor("saturation", options.saturation, generator);
  at::Tensor result = image;
  for (int i = 0; i < 4; ++i) {  // torchvision's fourth is hue
    const auto change = order.const_data_ptr<std::int64_t>()[i];
    if (change == 0 && options.brightness > 0) result = adjust_brightness(result, brightness);
    if (change == 1 && options.contrast > 0) result = adjust_contrast(result, contrast);
    if (change == 2 && options.saturation > 0) result = adjust_saturation(result, saturation);
  }
  return result;
}

}  // namespace paceline::data::transforms
