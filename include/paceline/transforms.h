#pragma once

/// @file
/// Transforms of images, as torchvision's.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>

#include <paceline/api.h>

/// Transforms of images, with the names and the results of torchvision.transforms.v2.
///
/// An image is a CPU tensor of shape (..., height, width), for most functions (..., channels,
/// height, width). A size or padding is one number or several in braces.
///
/// Random functions take their numbers from `generator`, a CPU generator, in the order in which
/// torchvision takes them: after torch.manual_seed(seed), it has the same results as these have
/// with a generator of that seed. Give them the generator that data::map passes on.
///
/// All throw UsageError if the shape or an argument does not fit. Write transforms::pad and
/// transforms::resize, not pad and resize: LibTorch has functions of these names.
namespace paceline::data::transforms {

/// Mirrors left and right.
PACELINE_API at::Tensor hflip(const at::Tensor& image);
/// Mirrors top and bottom.
PACELINE_API at::Tensor vflip(const at::Tensor& image);

/// The rectangle from row `top` and column `left`. Where it reaches out of the image, it is 0.
PACELINE_API at::Tensor crop(const at::Tensor& image, std::int64_t top, std::int64_t left,
                             std::int64_t height, std::int64_t width);
/// The middle, of `size`: {height, width}, or one number for both. A smaller image is padded with
/// 0.
PACELINE_API at::Tensor center_crop(const at::Tensor& image, at::IntArrayRef size);

/// What padding consists of.
enum class PaddingMode {
  constant,  ///< One value.
  edge,      ///< The outermost pixels, repeated.
  reflect    ///< The image, mirrored at its outermost pixels, which are not repeated.
};

/// Adds a border. `padding`: {left, top, right, bottom}, {left and right, top and bottom}, or one
/// number for all; none if it is empty. `fill`: the value for PaddingMode::constant.
PACELINE_API at::Tensor pad(const at::Tensor& image, at::IntArrayRef padding, double fill = 0,
                            PaddingMode mode = PaddingMode::constant);

/// Scales to `size`, bilinearly: {height, width}, or one number for the shorter side, which keeps
/// the ratio of the sides. `antialias`: filters when it makes the image smaller. Integers are
/// scaled as float32 and rounded; on some CPUs torchvision scales bytes as integers, and its
/// results may differ by 1.
PACELINE_API at::Tensor resize(const at::Tensor& image, at::IntArrayRef size,
                               bool antialias = true);

/// (image - mean) / std in each channel, of an image of floating point numbers. One number each, or
/// one for each channel.
PACELINE_API at::Tensor normalize(const at::Tensor& image, at::ArrayRef<double> mean,
                                  at::ArrayRef<double> std);

/// A float32 image. Integers are scaled so that their type's greatest value becomes 1: bytes to
/// [0, 1]. As to_dtype(image, torch.float32, scale=True).
PACELINE_API at::Tensor to_float(const at::Tensor& image);

/// image * factor, within the range of its type: [0, 1] for floating point numbers.
PACELINE_API at::Tensor adjust_brightness(const at::Tensor& image, double factor);
/// Moves each value away from the mean brightness, or to it if factor < 1. For 1 or 3 channels.
PACELINE_API at::Tensor adjust_contrast(const at::Tensor& image, double factor);
/// Moves each value away from its pixel's brightness, or to it if factor < 1. For 1 or 3 channels.
PACELINE_API at::Tensor adjust_saturation(const at::Tensor& image, double factor);

/// Pads the image and cuts a rectangle of `size` out at a random place, as RandomCrop. Padding is
/// as for pad; {} is none.
PACELINE_API at::Tensor random_crop(const at::Tensor& image, at::IntArrayRef size,
                                    at::IntArrayRef padding, at::Generator& generator,
                                    double fill = 0, PaddingMode mode = PaddingMode::constant);

/// Mirrors left and right with probability `p`, as RandomHorizontalFlip.
PACELINE_API at::Tensor random_horizontal_flip(const at::Tensor& image, double p,
                                               at::Generator& generator);

/// Options of random_resized_crop.
struct RandomResizedCropOptions {
  std::array<double, 2> scale = {0.08, 1.0};             ///< The crop's part of the area.
  std::array<double, 2> ratio = {3.0 / 4.0, 4.0 / 3.0};  ///< Its width by its height.
  bool antialias = true;                                 ///< See resize.
};

/// Cuts a rectangle of random size, sides and place out and resizes it to `size`, {height, width}
/// or one number for both, as RandomResizedCrop.
PACELINE_API at::Tensor random_resized_crop(const at::Tensor& image, at::IntArrayRef size,
                                            at::Generator& generator,
                                            const RandomResizedCropOptions& options = {});

/// How much color_jitter changes: by a factor from max(0, 1 - value) to 1 + value. 0: not at all.
struct ColorJitterOptions {
  double brightness = 0;  ///< See adjust_brightness.
  double contrast = 0;    ///< See adjust_contrast.
  double saturation = 0;  ///< See adjust_saturation.
};

/// Changes brightness, contrast and saturation at random, in a random order, as ColorJitter without
/// a change of hue.
PACELINE_API at::Tensor color_jitter(const at::Tensor& image, const ColorJitterOptions& options,
                                     at::Generator& generator);

}  // namespace paceline::data::transforms
