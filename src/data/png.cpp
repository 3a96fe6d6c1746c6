#include <fmt/format.h>
#include <png.h>

#include <cstring>
#include <new>

#include "data/image_codec.h"

namespace paceline::data {
namespace {

constexpr std::size_t kMaxPngInflation = 1032;  // no deflate stream grows by more

// libpng with its input. What libpng calls gets a pointer to it.
class PngReader {
 public:
  explicit PngReader(std::span<const std::uint8_t> file);
  ~PngReader() { ::png_destroy_read_struct(&png_, &info_, nullptr); }
  PngReader(const PngReader&) = delete;
  PngReader& operator=(const PngReader&) = delete;

  // Both: see ErrorExit::run. After the first, width() and the others are known.
  bool read_header(bool to_rgb);
  bool read_pixels(std::uint8_t* pixels);

  std::int64_t width() const { return ::png_get_image_width(png_, info_); }
  std::int64_t height() const { return ::png_get_image_height(png_, info_); }
  std::size_t row_size() const { return ::png_get_rowbytes(png_, info_); }
  // Of the data before the conversion to 8 bits: a lower bound, since it leaves out interlacing.
  std::size_t stored_size() const { return stored_row_size_ * static_cast<std::size_t>(height()); }
  bool is_grey() const { return is_grey_; }
  const char* error() const { return exit_.reason(); }
  std::size_t offset() const { return offset_; }

 private:
  static void on_error(png_structp png, png_const_charp reason);
  static void on_warning(png_structp /*png*/, png_const_charp /*reason*/) {}
  static void on_read(png_structp png, png_bytep to, std::size_t size);

  std::span<const std::uint8_t> file_;
  std::size_t offset_ = 0;
  std::size_t stored_row_size_ = 0;
  bool is_grey_ = false;
  ErrorExit exit_;
  png_structp png_;
  png_infop info_;
};

PngReader::PngReader(std::span<const std::uint8_t> file)
    : file_(file),
      png_(::png_create_read_struct(PNG_LIBPNG_VER_STRING, this, on_error, on_warning)),
      info_(png_ != nullptr ? ::png_create_info_struct(png_) : nullptr) {
  if (info_ == nullptr) {
    ::png_destroy_read_struct(&png_, nullptr, nullptr);
    throw std::bad_alloc();
  }
  ::png_set_read_fn(png_, this, on_read);
}

void PngReader::on_error(png_structp png, png_const_charp reason) {
  static_cast<PngReader*>(::png_get_error_ptr(png))->exit_.leave(reason);
}

void PngReader::on_read(png_structp png, png_bytep to, std::size_t size) {
  auto& self = *static_cast<PngReader*>(::png_get_io_ptr(png));
  if (size > self.file_.size() - self.offset_) {
    self.offset_ = self.file_.size();
    self.exit_.leave("the PNG file is truncated");
  }
  std::memcpy(to, self.file_.data() + self.offset_, size);
  self.offset_ += size;
}

bool PngReader::read_header(bool to_rgb) {
  return exit_.run([this, to_rgb] {
    ::png_read_info(png_, info_);
    is_grey_ = (::png_get_color_type(png_, info_) & PNG_COLOR_MASK_COLOR) == 0;
    stored_row_size_ = ::png_get_rowbytes(png_, info_);
    ::png_set_expand(png_);  // palettes to RGB, 1, 2 and 4 bits to 8
    ::png_set_scale_16(png_);
    ::png_set_strip_alpha(png_);
    if (to_rgb) ::png_set_gray_to_rgb(png_);
    ::png_set_interlace_handling(png_);
    ::png_read_update_info(png_, info_);
  });
}

bool PngReader::read_pixels(std::uint8_t* pixels) {
  return exit_.run([this, pixels] {
    const bool interlaced = ::png_get_interlace_type(png_, info_) != PNG_INTERLACE_NONE;
    for (int pass = 0; pass < (interlaced ? PNG_INTERLACE_ADAM7_PASSES : 1); ++pass) {
      for (std::int64_t row = 0; row < height(); ++row) {
        ::png_read_row(png_, pixels + static_cast<std::size_t>(row) * row_size(), nullptr);
      }
    }
    ::png_read_end(png_, nullptr);
  });
}

}  // namespace

Image decode_png(const EncodedImage& encoded, ImageChannels channels) {
  PngReader reader(encoded.file);
  const auto fail = [&] { encoded.fail(reader.error(), reader.offset()); };
  if (!reader.read_header(channels == ImageChannels::rgb)) fail();
  const auto decoded_channels = reader.is_grey() ? channels : ImageChannels::rgb;
  Image image =
      encoded.make_image(reader.width(), reader.height(), decoded_channels, reader.offset());
  // So that the memory is bounded by the file, not only by its header.
  if (reader.stored_size() / kMaxPngInflation > encoded.file.size()) {
    encoded.fail(
        fmt::format("the header declares {} x {} pixels, more than a file of {} bytes can have",
                    image.width, image.height, encoded.file.size()),
        reader.offset());
  }
  image.pixels.resize(reader.row_size() * static_cast<std::size_t>(image.height));
  if (!reader.read_pixels(image.pixels.data())) fail();
  return channels == ImageChannels::grey && !reader.is_grey() ? to_grey(image) : image;
}

}  // namespace paceline::data
