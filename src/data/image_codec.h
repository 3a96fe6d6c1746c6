#pragma once

#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "data/image.h"

// What the decoders of the formats have in common.
namespace paceline::data {

struct EncodedImage {
  std::span<const std::uint8_t> file;
  const std::string& path;
  std::int64_t max_pixels;

  // Throws CorruptFile that names the byte at `offset`.
  [[noreturn]] void fail(std::string_view reason, std::size_t offset) const;
  // An image of the size that the header before `offset` declares, without its pixels. Throws
  // CorruptFile if it is larger than allowed.
  Image make_image(std::int64_t width, std::int64_t height, ImageChannels channels,
                   std::size_t offset) const;
};

// Where a C library goes on that reports an error by a function which must not return.
class ErrorExit {
 public:
  // Runs `function` and returns whether it got to its end. A call of leave() ends it in the middle,
  // without destructors: `function`, and all that it calls, must have no objects that need one.
  template <typename Function>
  [[gnu::noinline]] bool run(Function function) {
    if (setjmp(target_) != 0) return false;  // NOLINT(cert-err52-cpp): the library is in C
    function();
    return true;
  }
  [[noreturn]] void leave(const char* reason) {
    std::strncpy(reason_, reason, sizeof(reason_) - 1);
    std::longjmp(target_, 1);  // NOLINT(cert-err52-cpp)
  }
  const char* reason() const { return reason_; }

 private:
  std::jmp_buf target_{};
  char reason_[256] = "";
};

Image decode_png(const EncodedImage& encoded, ImageChannels channels);
Image decode_jpeg(const EncodedImage& encoded, ImageChannels channels);

// The colours of `image` as brightness, rounded as Pillow rounds it.
Image to_grey(const Image& image);

}  // namespace paceline::data
