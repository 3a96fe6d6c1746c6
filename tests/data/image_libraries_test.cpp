// Compiled with src/data/image.cpp as it is where neither library was found.
#include <gmock/gmock.h>

#include <paceline/error.h>

#include <cstdint>
#include <vector>

#include "data/image.h"

namespace paceline::data {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using ::testing::ThrowsMessage;

void expect_missing(const std::vector<std::uint8_t>& file, const char* package) {
  EXPECT_THAT([&] { decode_image(file, "a/file", ImageChannels::rgb); },
              ThrowsMessage<UsageError>(AllOf(StartsWith("a/file: "), HasSubstr(package),
                                              HasSubstr("build Paceline again"))));
}

TEST(ImageWithoutLibraries, NamesThePackageToInstall) {
  expect_missing({0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n'}, "package libpng-dev");
  expect_missing({0xff, 0xd8, 0xff}, "package libjpeg-dev");
}

}  // namespace
}  // namespace paceline::data
