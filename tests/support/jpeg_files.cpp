#include <cstdio>
// jpeglib.h needs what cstdio declares.
#include <jpeglib.h>

#include <cstdlib>

#include "support/image_files.h"

namespace paceline::test {

Bytes make_jpeg(const JpegFormat& format, const Samples& samples) {
  constexpr J_COLOR_SPACE kSpaces[] = {JCS_UNKNOWN, JCS_GRAYSCALE, JCS_UNKNOWN, JCS_RGB, JCS_CMYK};
  jpeg_error_mgr errors{};
  jpeg_compress_struct state{};
  state.err = ::jpeg_std_error(&errors);  // ends the test if it fails
  ::jpeg_create_compress(&state);
  unsigned char* memory = nullptr;
  unsigned long size = 0;
  ::jpeg_mem_dest(&state, &memory, &size);
  state.image_width = static_cast<JDIMENSION>(format.width);
  state.image_height = static_cast<JDIMENSION>(format.height);
  state.input_components = format.channels;
  state.in_color_space = kSpaces[format.channels];
  ::jpeg_set_defaults(&state);
  ::jpeg_set_quality(&state, 100, TRUE);
  state.write_Adobe_marker = format.adobe_marker ? TRUE : FALSE;
  state.restart_interval = static_cast<unsigned>(format.restart_interval);
  if (format.progressive) ::jpeg_simple_progression(&state);
  ::jpeg_start_compress(&state, TRUE);
  for (int y = 0; y < format.height; ++y) {
    Bytes row;
    for (int x = 0; x < format.width; ++x) {
      for (int c = 0; c < format.channels; ++c) {
        row.push_back(static_cast<std::uint8_t>(samples(x, y, c)));
      }
    }
    JSAMPROW rows[] = {row.data()};
    ::jpeg_write_scanlines(&state, rows, 1);
  }
  ::jpeg_finish_compress(&state);
  ::jpeg_destroy_compress(&state);
  Bytes file(memory, memory + size);
  std::free(memory);
  return file;
}

}  // namespace paceline::test
