#include <gmock/gmock.h>

#include <paceline/error.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "data/image.h"
#include "support/image_files.h"

namespace paceline::data {
namespace {

using FileBytes = test::Bytes;
using test::make_jpeg;
using test::make_png;
using test::PngFormat;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using ::testing::ThrowsMessage;

constexpr auto kRgb = ImageChannels::rgb;
constexpr auto kGrey = ImageChannels::grey;

Image decode(const FileBytes& file, ImageChannels channels = kRgb) {
  return decode_image(file, "a/file", channels);
}

void expect_corrupt_image(const FileBytes& file, const std::string& reason) {
  EXPECT_THAT([&] { decode(file); },
              ThrowsMessage<CorruptFile>(AllOf(StartsWith("a/file: "), HasSubstr(reason))));
}

// Expects pixels within `tolerance` of `expected(x, y, channel)`.
template <typename Expected>
void expect_pixels(const Image& image, int width, int height, int channels, Expected expected,
                   double tolerance = 0) {
  ASSERT_EQ(image.width, width);
  ASSERT_EQ(image.height, height);
  ASSERT_EQ(image.channels, channels);
  ASSERT_EQ(std::ssize(image.pixels), width * height * channels);
  auto pixel = image.pixels.begin();
  for (int y = 0; y < height; ++y) {
    for (int x = 0; x < width; ++x) {
      for (int c = 0; c < channels; ++c, ++pixel) {
        ASSERT_NEAR(*pixel, expected(x, y, c), tolerance) << x << ", " << y << ", " << c;
      }
    }
  }
}

unsigned noise(int x, int y, int channel) {
  return static_cast<unsigned>(x * 7919 + y * 104729 + channel * 1299709) * 2654435761U >> 8;
}

struct PngCase {
  int colour_type;
  int depth;
  bool interlaced;
};

class Png : public ::testing::TestWithParam<PngCase> {
 protected:
  static unsigned max() { return (1U << GetParam().depth) - 1; }
  static unsigned sample(int x, int y, int channel) { return noise(x, y, channel) & max(); }
  static bool has_colour() { return (GetParam().colour_type & 2) != 0; }
  // A sample as 8 bits, by the specification's formula.
  static double as_byte(unsigned sample) { return std::floor(sample * 255.0 / max() + 0.5); }

  static FileBytes palette() {
    FileBytes colours;
    for (unsigned i = 0; i <= max(); ++i) {
      for (unsigned c = 0; c < 3; ++c) colours.push_back(static_cast<std::uint8_t>(i * 5 + c * 90));
    }
    return colours;
  }
  static double expected_rgb(int x, int y, int channel) {
    if (GetParam().colour_type == 3) {
      return palette()[sample(x, y, 0) * 3 + static_cast<unsigned>(channel)];
    }
    return as_byte(sample(x, y, has_colour() ? channel : 0));
  }
  static FileBytes file() {
    const auto [colour_type, depth, interlaced] = GetParam();
    const PngFormat format{.width = 13,
                           .height = 9,
                           .depth = depth,
                           .colour_type = colour_type,
                           .interlaced = interlaced,
                           .palette = colour_type == 3 ? palette() : FileBytes()};
    return make_png(format, sample);
  }
};

TEST_P(Png, IsDecodedAsRgb) {
  expect_pixels(decode(file()), 13, 9, 3, expected_rgb);
}

TEST_P(Png, IsDecodedAsGrey) {
  const auto expected = [](int x, int y, int /*channel*/) {
    if (!has_colour()) return expected_rgb(x, y, 0);
    return 0.299 * expected_rgb(x, y, 0) + 0.587 * expected_rgb(x, y, 1) +
           0.114 * expected_rgb(x, y, 2);
  };
  expect_pixels(decode(file(), kGrey), 13, 9, 1, expected, has_colour() ? 0.51 : 0);
}

TEST_P(Png, IsCorruptIfTruncatedAtAnyByte) {
  const FileBytes whole = file();
  for (std::size_t size = 0; size < whole.size(); ++size) {
    expect_corrupt_image(
        FileBytes(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size)), "byte");
  }
}

std::vector<PngCase> png_cases() {
  std::vector<PngCase> cases;
  for (const bool interlaced : {false, true}) {
    for (const int depth : {1, 2, 4, 8, 16}) cases.push_back({0, depth, interlaced});
    for (const int depth : {1, 2, 4, 8}) cases.push_back({3, depth, interlaced});
    for (const int type : {2, 4, 6}) {
      for (const int depth : {8, 16}) cases.push_back({type, depth, interlaced});
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Formats, Png, ::testing::ValuesIn(png_cases()),
                         [](const auto& parameters) {
                           return "Type" + std::to_string(parameters.param.colour_type) + "Depth" +
                                  std::to_string(parameters.param.depth) +
                                  (parameters.param.interlaced ? "Interlaced" : "");
                         });

TEST(PngFile, LosesItsTransparency) {
  const auto plain = [](int x, int y, int /*channel*/) { return noise(x, y, 0) & 1U; };
  const PngFormat palette{.width = 5,
                          .height = 3,
                          .depth = 1,
                          .colour_type = 3,
                          .palette = {10, 20, 30, 40, 50, 60},
                          .transparency = {0, 128}};
  expect_pixels(decode(make_png(palette, plain)), 5, 3, 3,
                [&](int x, int y, int c) { return (plain(x, y, 0) * 3 + 1U + c) * 10; });
  const PngFormat grey{.width = 5, .height = 3, .colour_type = 0, .transparency = {0, 1}};
  expect_pixels(decode(make_png(grey, plain), kGrey), 5, 3, 1, plain);
}

FileBytes small_png() {
  return make_png({.width = 6, .height = 5},
                  [](int x, int y, int c) { return noise(x, y, c) & 255U; });
}

TEST(PngFile, IsCorruptWithAWrongChecksum) {
  FileBytes file = small_png();
  file[file.size() - 12 - 1] ^= 1;  // of IDAT, before the 12 bytes of IEND
  expect_corrupt_image(file, "CRC error");
}

TEST(PngFile, IsCorruptIfLargerThanAllowed) {
  const auto file = make_png({.width = 100, .height = 100}, noise);
  EXPECT_EQ(decode_image(file, "a/file", kRgb, 10000).width, 100);
  EXPECT_THAT([&] { decode_image(file, "a/file", kRgb, 9999); },
              ThrowsMessage<CorruptFile>(HasSubstr("100 x 100 pixels")));
}

// 13 GB of pixels in a file of 100 bytes.
TEST(PngFile, IsCorruptIfItsHeaderDeclaresMoreThanItCanHave) {
  const auto with_size = [](std::uint8_t high) {
    FileBytes file = small_png();
    const FileBytes header = test::png_chunk("IHDR", {0, high, 0, 0, 0, high, 0, 0, 8, 2, 0, 0, 0});
    std::copy(header.begin(), header.end(), file.begin() + 8);
    return file;
  };
  expect_corrupt_image(with_size(1), "the header declares 65536 x 65536 pixels");
  FileBytes file = small_png();
  const FileBytes header = test::png_chunk("IHDR", {0, 0, 0x20, 0, 0, 0, 0x20, 0, 8, 2, 0, 0, 0});
  std::copy(header.begin(), header.end(), file.begin() + 8);
  expect_corrupt_image(file, "the header declares 8192 x 8192 pixels, more than a file of");
  expect_corrupt_image(with_size(0), "Invalid IHDR");
}

// Smooth, since JPEG halves the resolution of colours.
unsigned gradient(int x, int y, int channel) {
  return static_cast<unsigned>(40 + (channel == 1 ? 4 * y : 3 * x) + 20 * channel);
}

TEST(JpegFile, IsDecodedAsRgb) {
  for (const bool progressive : {false, true}) {
    const FileBytes file =
        make_jpeg({.width = 37, .height = 21, .progressive = progressive}, gradient);
    expect_pixels(decode(file), 37, 21, 3, gradient, 6);
  }
}

TEST(JpegFile, IsDecodedAsGrey) {
  const auto brightness = [](int x, int y, int /*channel*/) {
    return 0.299 * gradient(x, y, 0) + 0.587 * gradient(x, y, 1) + 0.114 * gradient(x, y, 2);
  };
  const FileBytes file = make_jpeg({.width = 37, .height = 21}, gradient);
  expect_pixels(decode(file, kGrey), 37, 21, 1, brightness, 2);
}

TEST(JpegFile, OfGreyIsDecodedAsBoth) {
  const auto grey = [](int x, int y, int /*channel*/) { return gradient(x, y, 1); };
  const FileBytes file = make_jpeg({.width = 37, .height = 21, .channels = 1}, gradient);
  expect_pixels(
      decode(file, kGrey), 37, 21, 1, [](int x, int y, int) { return gradient(x, y, 0); }, 2);
  expect_pixels(decode(make_jpeg({.width = 37, .height = 21, .channels = 1}, grey)), 37, 21, 3,
                grey, 2);
}

// Adobe's marker says that a sample is the light that the ink lets through.
TEST(JpegFile, OfInksIsConverted) {
  const auto light = [](int x, int y, int channel) { return gradient(x, y, channel % 3) + 50U; };
  const auto ink = [&](int x, int y, int channel) { return 255U - light(x, y, channel); };
  const auto expected = [&](int x, int y, int channel) {
    return light(x, y, channel) * light(x, y, 3) / 255.0;
  };
  const auto grey = [&](int x, int y, int /*channel*/) {
    return 0.299 * expected(x, y, 0) + 0.587 * expected(x, y, 1) + 0.114 * expected(x, y, 2);
  };
  const FileBytes adobe =
      make_jpeg({.width = 16, .height = 19, .channels = 4, .adobe_marker = true}, light);
  const FileBytes plain = make_jpeg({.width = 16, .height = 19, .channels = 4}, ink);
  for (const FileBytes& file : {adobe, plain}) {
    expect_pixels(decode(file), 16, 19, 3, expected, 4);
    expect_pixels(decode(file, kGrey), 16, 19, 1, grey, 4);
  }
}

TEST(JpegFile, IsCorruptIfTruncatedAtAnyByte) {
  for (const bool progressive : {false, true}) {
    const FileBytes file = make_jpeg(
        {.width = 40, .height = 24, .progressive = progressive, .restart_interval = 2}, gradient);
    for (std::size_t size = 0; size < file.size(); ++size) {
      expect_corrupt_image(
          FileBytes(file.begin(), file.begin() + static_cast<std::ptrdiff_t>(size)), "byte");
    }
  }
}

TEST(JpegFile, IsCorruptIfLargerThanAllowed) {
  FileBytes file = make_jpeg({.width = 40, .height = 24}, gradient);
  EXPECT_THAT([&] { decode_image(file, "a/file", kRgb, 959); },
              ThrowsMessage<CorruptFile>(HasSubstr("40 x 24 pixels")));
  const std::array<std::uint8_t, 5> start_of_frame = {0xff, 0xc0, 0, 17, 8};
  auto frame = std::search(file.begin(), file.end(), start_of_frame.begin(), start_of_frame.end());
  ASSERT_NE(frame, file.end());
  frame[5] = frame[7] = 0xff;  // the high bytes of height and width
  expect_corrupt_image(file, "the header declares 65320 x 65304 pixels");
}

TEST(JpegFile, IsCorruptWithTooManyScans) {
  FileBytes file = make_jpeg({.width = 40, .height = 24, .progressive = true}, gradient);
  const std::array<std::uint8_t, 2> start_of_scan = {0xff, 0xda};
  const auto last =
      std::find_end(file.begin(), file.end(), start_of_scan.begin(), start_of_scan.end());
  ASSERT_NE(last, file.end());
  const FileBytes scan(last, file.end() - 2);
  for (int i = 0; i < 500; ++i) file.insert(file.end() - 2, scan.begin(), scan.end());
  expect_corrupt_image(file, "more than 500 scans");
}

// Any change gives an image or CorruptFile.
TEST(DamagedImages, AreDecodedOrCorrupt) {
  std::mt19937 random(1);
  const auto grey = [](int x, int y, int /*channel*/) { return gradient(x, y, 0); };
  for (const FileBytes& whole :
       {small_png(), make_png({.width = 9, .height = 9, .interlaced = true}, noise),
        make_jpeg({.width = 24, .height = 24}, gradient),
        make_jpeg({.width = 24, .height = 24, .progressive = true}, gradient),
        make_jpeg({.width = 24, .height = 24, .channels = 1}, grey)}) {
    for (int i = 0; i < 3000; ++i) {
      FileBytes file = whole;
      for (int changes = 0; changes < 1 + i % 3; ++changes) {
        file[random() % file.size()] = static_cast<std::uint8_t>(random());
      }
      try {
        const Image image = decode_image(file, "a/file", i % 2 == 0 ? kRgb : kGrey, 1 << 16);
        ASSERT_EQ(std::ssize(image.pixels), image.width * image.height * image.channels);
      } catch (const CorruptFile&) {  // as it should be
      }
    }
  }
}

TEST(OtherFiles, AreNoImages) {
  expect_corrupt_image({}, "neither a PNG nor a JPEG");
  expect_corrupt_image({'G', 'I', 'F', '8', '9', 'a'}, "neither a PNG nor a JPEG");
}

}  // namespace
}  // namespace paceline::data
