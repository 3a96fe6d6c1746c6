#include <ATen/TensorOperators.h>
#include <fmt/format.h>

#include <paceline/error.h>
#include <paceline/transforms.h>

#include "data/image_shape.h"

namespace paceline::data::transforms {
namespace {

// Bytes from 0 to 255, or floating point numbers from 0 to 1.
void check_colours(const char* function, const at::Tensor& image, double factor) {
  size_of(function, image, 3);
  const std::int64_t channels = image.size(-3);
  const bool known = image.is_floating_point() || image.scalar_type() == at::kByte;
  if (known && (channels == 1 || channels == 3) && factor >= 0) return;
  throw UsageError(
      fmt::format("{}: got {} channels of {} and the factor {}; it takes 1 or 3 "
                  "channels of bytes or floating point numbers, and a factor that is "
                  "not negative",
                  function, channels, c10::toString(image.scalar_type()), factor));
}

// As torchvision's rgb_to_grayscale: one channel, bytes rounded down, as floating point numbers.
at::Tensor brightness_of(const at::Tensor& image) {
  if (image.size(-3) == 1) return image.is_floating_point() ? image : image.to(at::kFloat);
  const auto channel = [&](std::int64_t i) { return image.narrow(-3, i, 1); };
  at::Tensor grey = (channel(0) * 0.2989).add_(channel(1), 0.587).add_(channel(2), 0.114);
  return image.is_floating_point() ? grey : grey.floor_();
}

at::Tensor within_range(at::Tensor values, at::ScalarType type) {
  return values.clamp_(0, at::isFloatingType(type) ? 1 : 255).to(type);
}

// image * factor + other * (1 - factor), with torchvision's operations, whose last bits count where
// bytes are rounded down.
at::Tensor blend(const at::Tensor& image, const at::Tensor& other, double factor) {
  return within_range((image * factor).add_(other, 1 - factor), image.scalar_type());
}

}  // namespace

at::Tensor adjust_brightness(const at::Tensor& image, double factor) {
  check_colours("adjust_brightness", image, factor);
  return within_range(image * factor, image.scalar_type());
}

at::Tensor adjust_contrast(const at::Tensor& image, double factor) {
  check_colours("adjust_contrast", image, factor);
  return blend(image, brightness_of(image).mean({-3, -2, -1}, /*keepdim=*/true), factor);
}

at::Tensor adjust_saturation(const at::Tensor& image, double factor) {
  check_colours("adjust_saturation", image, factor);
  if (image.size(-3) == 1) return image;
  return blend(image, brightness_of(image), factor);
}

}  // namespace paceline::data::transforms
