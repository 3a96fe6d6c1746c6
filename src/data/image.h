#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace paceline::data {

enum class ImageChannels : std::uint8_t { grey = 1, rgb = 3 };

struct Image {
  std::int64_t width = 0;
  std::int64_t height = 0;
  std::int64_t channels = 0;
  std::vector<std::uint8_t> pixels;  // row by row, a pixel's channels side by side
};

// As many pixels as the Python library Pillow accepts: a small file may decode into gigabytes.
inline constexpr std::int64_t kMaxImagePixels = 178'956'970;

// Decodes a PNG or a JPEG file, which its first bytes tell apart. Alpha is dropped, 16 bits are
// rounded to 8. Throws CorruptFile, which names `path`, unless `file` is one complete image of at
// most `max_pixels`, and UsageError if the library for the format was not there at the build.
Image decode_image(std::span<const std::uint8_t> file, const std::string& path,
                   ImageChannels channels, std::int64_t max_pixels = kMaxImagePixels);

}  // namespace paceline::data
