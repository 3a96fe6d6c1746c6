#include <zlib.h>

#include <array>
#include <stdexcept>

#include "support/image_files.h"

namespace paceline::test {
namespace {

void append(Bytes& to, const Bytes& from) {
  to.insert(to.end(), from.begin(), from.end());
}

Bytes big_endian(std::uint32_t value) {
  return {static_cast<std::uint8_t>(value >> 24), static_cast<std::uint8_t>(value >> 16),
          static_cast<std::uint8_t>(value >> 8), static_cast<std::uint8_t>(value)};
}

// Which pixels a pass has: every step-th from a start.
struct Pass {
  int x0, y0, dx, dy;
};

std::vector<Pass> passes(bool interlaced) {
  if (!interlaced) return {{0, 0, 1, 1}};
  return {{0, 0, 8, 8}, {4, 0, 8, 8}, {0, 4, 4, 8}, {2, 0, 4, 4},
          {0, 2, 2, 4}, {1, 0, 2, 2}, {0, 1, 1, 2}};
}

// A row of samples in as many bits each as the format has, after the byte for "no filter".
Bytes row_of(const PngFormat& format, const Pass& pass, int y, const Samples& samples) {
  constexpr std::array<int, 7> kChannels = {1, 0, 3, 1, 2, 0, 4};
  Bytes row = {0};
  int bits = 0;
  for (int x = pass.x0; x < format.width; x += pass.dx) {
    for (int c = 0; c < kChannels.at(static_cast<std::size_t>(format.colour_type)); ++c) {
      const unsigned sample = samples(x, y, c);
      for (int bit = format.depth - 1; bit >= 0; --bit, ++bits) {
        if (bits % 8 == 0) row.push_back(0);
        row.back() |= static_cast<std::uint8_t>((sample >> bit & 1U) << (7 - bits % 8));
      }
    }
  }
  return row;
}

Bytes deflated(const Bytes& plain) {
  uLongf size = ::compressBound(plain.size());
  Bytes packed(size);
  if (::compress(packed.data(), &size, plain.data(), plain.size()) != Z_OK) {
    throw std::runtime_error("zlib failed");
  }
  packed.resize(size);
  return packed;
}

}  // namespace

Bytes png_chunk(const char* type, const Bytes& data) {
  Bytes checked(type, type + 4);
  append(checked, data);
  Bytes chunk = big_endian(static_cast<std::uint32_t>(data.size()));
  append(chunk, checked);
  append(chunk, big_endian(static_cast<std::uint32_t>(
                    ::crc32(0, checked.data(), static_cast<uInt>(checked.size())))));
  return chunk;
}

Bytes make_png(const PngFormat& format, const Samples& samples) {
  Bytes header = big_endian(static_cast<std::uint32_t>(format.width));
  append(header, big_endian(static_cast<std::uint32_t>(format.height)));
  append(header,
         {static_cast<std::uint8_t>(format.depth), static_cast<std::uint8_t>(format.colour_type), 0,
          0, static_cast<std::uint8_t>(format.interlaced)});
  Bytes rows;
  for (const Pass& pass : passes(format.interlaced)) {
    if (pass.x0 >= format.width) continue;
    for (int y = pass.y0; y < format.height; y += pass.dy) {
      append(rows, row_of(format, pass, y, samples));
    }
  }
  Bytes file = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n'};
  append(file, png_chunk("IHDR", header));
  if (!format.palette.empty()) append(file, png_chunk("PLTE", format.palette));
  if (!format.transparency.empty()) append(file, png_chunk("tRNS", format.transparency));
  append(file, png_chunk("IDAT", deflated(rows)));
  append(file, png_chunk("IEND", {}));
  return file;
}

}  // namespace paceline::test
