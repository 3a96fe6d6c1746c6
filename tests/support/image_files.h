#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace paceline::test {

using Bytes = std::vector<std::uint8_t>;

// The sample of a channel at a place.
using Samples = std::function<unsigned(int x, int y, int channel)>;

// What a PNG file declares. The colour types: 0 grey, 2 RGB, 3 palette, 4 grey and alpha, 6 RGBA.
struct PngFormat {
  int width = 0;
  int height = 0;
  int depth = 8;
  int colour_type = 2;
  bool interlaced = false;
  Bytes palette{};       // PLTE
  Bytes transparency{};  // tRNS
};

// A PNG file, made without libpng.
Bytes make_png(const PngFormat& format, const Samples& samples);

// A chunk of a PNG file with its checksum.
Bytes png_chunk(const char* type, const Bytes& data);

// What a JPEG file declares.
struct JpegFormat {
  int width = 0;
  int height = 0;
  int channels = 3;  // 1 grey, 3 RGB, 4 CMYK
  bool progressive = false;
  bool adobe_marker = false;
  int restart_interval = 0;
};

// A JPEG file of libjpeg, of the best quality.
Bytes make_jpeg(const JpegFormat& format, const Samples& samples);

}  // namespace paceline::test
