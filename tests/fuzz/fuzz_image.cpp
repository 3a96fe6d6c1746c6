#include <paceline/error.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "data/image.h"

// Any bytes give an image with as many pixels as it says, or CorruptFile. Small images suffice, and
// are quick.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  constexpr std::int64_t kMaxPixels = 1 << 16;
  for (const auto channels :
       {paceline::data::ImageChannels::rgb, paceline::data::ImageChannels::grey}) {
    try {
      const auto image =
          paceline::data::decode_image(std::span(bytes, size), "fuzz", channels, kMaxPixels);
      const auto pixels = image.width * image.height;
      if (pixels <= 0 || pixels > kMaxPixels) std::abort();
      if (image.channels != static_cast<std::int64_t>(channels)) std::abort();
      if (std::ssize(image.pixels) != pixels * image.channels) std::abort();
    } catch (const paceline::CorruptFile&) {  // as it should be
    }
  }
  return 0;
}
