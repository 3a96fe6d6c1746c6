#include <cstdio>
// jpeglib.h needs what cstdio declares.
#include <jerror.h>
#include <jpeglib.h>

#include <vector>

#include "data/image_codec.h"

namespace paceline::data {
namespace {

// libjpeg with its input. What libjpeg calls gets `state_`, whose client_data is the reader.
class JpegReader {
 public:
  explicit JpegReader(std::span<const std::uint8_t> file) : file_(file) {}
  ~JpegReader() { ::jpeg_destroy_decompress(&state_); }
  JpegReader(const JpegReader&) = delete;
  JpegReader& operator=(const JpegReader&) = delete;

  // All: see ErrorExit::run. Call them in this order.
  bool read_header();
  bool start(ImageChannels channels);
  bool read_row(std::uint8_t* row);
  bool finish();

  std::int64_t width() const { return state_.image_width; }
  std::int64_t height() const { return state_.image_height; }
  bool is_cmyk() const {
    return state_.jpeg_color_space == JCS_CMYK || state_.jpeg_color_space == JCS_YCCK;
  }
  // Adobe's programs store CMYK inverted.
  bool is_inverted() const { return state_.saw_Adobe_marker != FALSE; }
  std::size_t row_size() const {
    return std::size_t{state_.output_width} * static_cast<std::size_t>(state_.output_components);
  }
  const char* error() const { return exit_.reason(); }
  std::size_t offset() const {
    return state_.src != nullptr ? file_.size() - state_.src->bytes_in_buffer : 0;
  }

 private:
  static JpegReader& reader_of(j_common_ptr state) {
    return *static_cast<JpegReader*>(state->client_data);
  }
  static void on_error(j_common_ptr state);
  static void on_message(j_common_ptr state, int level);
  static void on_progress(j_common_ptr state);

  std::span<const std::uint8_t> file_;
  ErrorExit exit_;
  jpeg_error_mgr errors_{};
  jpeg_progress_mgr progress_{};
  jpeg_decompress_struct state_{};
};

void JpegReader::on_error(j_common_ptr state) {
  char reason[JMSG_LENGTH_MAX];
  state->err->format_message(state, reason);
  reader_of(state).exit_.leave(reason);
}

// libjpeg makes up the end of a truncated file and warns. Its other warnings are about damage that
// it decodes around, as PyTorch's and Pillow's readers of images do.
void JpegReader::on_message(j_common_ptr state, int level) {
  if (level < 0 && state->err->msg_code == JWRN_JPEG_EOF) {
    reader_of(state).exit_.leave("the JPEG file is truncated");
  }
}

// Each scan of a progressive image takes time for the whole image, even if it has no data.
void JpegReader::on_progress(j_common_ptr state) {
  constexpr int kMaxScans = 500;
  auto& self = reader_of(state);
  if (self.state_.input_scan_number > kMaxScans) {
    self.exit_.leave("the JPEG file has more than 500 scans");
  }
}

bool JpegReader::read_header() {
  state_.err = ::jpeg_std_error(&errors_);
  errors_.error_exit = on_error;
  errors_.emit_message = on_message;
  state_.client_data = this;
  return exit_.run([this] {
    ::jpeg_create_decompress(&state_);
    progress_.progress_monitor = on_progress;
    state_.progress = &progress_;
    ::jpeg_mem_src(&state_, file_.data(), file_.size());
    ::jpeg_read_header(&state_, TRUE);
  });
}

bool JpegReader::start(ImageChannels channels) {
  return exit_.run([this, channels] {
    const auto wanted = channels == ImageChannels::grey ? JCS_GRAYSCALE : JCS_RGB;
    state_.out_color_space = is_cmyk() ? JCS_CMYK : wanted;
    ::jpeg_start_decompress(&state_);
  });
}

bool JpegReader::read_row(std::uint8_t* row) {
  return exit_.run([this, row] {
    JSAMPROW rows[] = {row};
    ::jpeg_read_scanlines(&state_, rows, 1);
  });
}

bool JpegReader::finish() {
  return exit_.run([this] { ::jpeg_finish_decompress(&state_); });
}

// The colours of inks on white paper.
void cmyk_to_rgb(const std::uint8_t* cmyk, std::uint8_t* rgb, std::int64_t width, bool inverted) {
  const auto light = [&](std::uint8_t ink) -> unsigned { return inverted ? ink : 255U - ink; };
  for (std::int64_t x = 0; x < width; ++x, cmyk += 4, rgb += 3) {
    for (int channel = 0; channel < 3; ++channel) {
      const unsigned product = light(cmyk[channel]) * light(cmyk[3]);
      rgb[channel] = static_cast<std::uint8_t>((product + 127U) / 255U);
    }
  }
}

// Returns whether all rows were read.
bool read_rows(JpegReader& reader, Image& image) {
  const auto row_size = static_cast<std::size_t>(image.width * image.channels);
  std::vector<std::uint8_t> cmyk(reader.is_cmyk() ? reader.row_size() : 0);
  image.pixels.resize(row_size * static_cast<std::size_t>(image.height));
  std::uint8_t* row = image.pixels.data();
  for (std::int64_t y = 0; y < image.height; ++y, row += row_size) {
    if (!reader.read_row(cmyk.empty() ? row : cmyk.data())) return false;
    if (!cmyk.empty()) cmyk_to_rgb(cmyk.data(), row, image.width, reader.is_inverted());
  }
  return true;
}

}  // namespace

Image decode_jpeg(const EncodedImage& encoded, ImageChannels channels) {
  JpegReader reader(encoded.file);
  const auto fail = [&] { encoded.fail(reader.error(), reader.offset()); };
  if (!reader.read_header()) fail();
  Image image =
      encoded.make_image(reader.width(), reader.height(),
                         reader.is_cmyk() ? ImageChannels::rgb : channels, reader.offset());
  if (!reader.start(channels) || !read_rows(reader, image) || !reader.finish()) fail();
  return channels == ImageChannels::grey && reader.is_cmyk() ? to_grey(image) : image;
}

}  // namespace paceline::data
