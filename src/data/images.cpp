#include <paceline/images.h>

#include <ATen/ops/from_blob.h>

#include "base/input_file.h"
#include "data/image.h"

namespace paceline::data {

at::Tensor read_image(const std::filesystem::path& path, ImageMode mode) {
  const auto channels = mode == ImageMode::grey ? ImageChannels::grey : ImageChannels::rgb;
  Image image = decode_image(base::read_file(path), path.string(), channels);
  const at::Tensor pixels =
      at::from_blob(image.pixels.data(), {image.height, image.width, image.channels}, at::kByte);
  return pixels.permute({2, 0, 1}).clone(at::MemoryFormat::Contiguous);
}

}  // namespace paceline::data
