#include "data/image.h"

#include <fmt/format.h>

#include <paceline/error.h>

#include <algorithm>
#include <array>

#include "data/image_codec.h"

namespace paceline::data {
namespace {

constexpr std::array<std::uint8_t, 8> kPngSignature = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n'};
constexpr std::array<std::uint8_t, 3> kJpegSignature = {0xff, 0xd8, 0xff};

bool starts_with(std::span<const std::uint8_t> file, std::span<const std::uint8_t> signature) {
  return file.size() >= signature.size() &&
         std::ranges::equal(file.first(signature.size()), signature);
}

}  // namespace

void EncodedImage::fail(std::string_view reason, std::size_t offset) const {
  throw CorruptFile(fmt::format("{}: {} (at byte {})", path, reason, offset));
}

Image EncodedImage::make_image(std::int64_t width, std::int64_t height, ImageChannels channels,
                               std::size_t offset) const {
  if (width <= 0 || height <= 0 || width > max_pixels / height) {
    fail(fmt::format("the header declares {} x {} pixels; an image has from 1 to {} pixels", width,
                     height, max_pixels),
         offset);
  }
  return {width, height, static_cast<std::int64_t>(channels), {}};
}

Image to_grey(const Image& image) {
  Image grey{image.width, image.height, 1, {}};
  grey.pixels.resize(image.pixels.size() / 3);
  const std::uint8_t* colour = image.pixels.data();
  for (std::uint8_t& pixel : grey.pixels) {
    // 0.299, 0.587 and 0.114, in 65536ths
    const std::uint32_t sum = 19595U * colour[0] + 38470U * colour[1] + 7471U * colour[2];
    pixel = static_cast<std::uint8_t>((sum + 0x8000U) >> 16);
    colour += 3;
  }
  return grey;
}

#ifndef PACELINE_PNG
Image decode_png(const EncodedImage& encoded, ImageChannels /*channels*/) {
  throw UsageError(encoded.path +
                   ": Paceline was built without libpng, so it cannot read PNG files; install "
                   "Debian's package libpng-dev and build Paceline again");
}
#endif

#ifndef PACELINE_JPEG
Image decode_jpeg(const EncodedImage& encoded, ImageChannels /*channels*/) {
  throw UsageError(encoded.path +
                   ": Paceline was built without libjpeg, so it cannot read JPEG files; install "
                   "Debian's package libjpeg-dev and build Paceline again");
}
#endif

Image decode_image(std::span<const std::uint8_t> file, const std::string& path,
                   ImageChannels channels, std::int64_t max_pixels) {
  const EncodedImage encoded{file, path, max_pixels};
  if (starts_with(file, kPngSignature)) return decode_png(encoded, channels);
  if (starts_with(file, kJpegSignature)) return decode_jpeg(encoded, channels);
  encoded.fail("neither a PNG nor a JPEG file, by its first bytes", 0);
}

}  // namespace paceline::data
