#include <fmt/format.h>

#include <paceline/datasets.h>
#include <paceline/error.h>

#include <algorithm>
#include <array>
#include <string>
#include <system_error>

#include "base/environment.h"
#include "data/byte_samples.h"

namespace paceline::data {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kSide = 28;
constexpr int kClasses = 10;

fs::path find_file(const fs::path& folder, const std::string& name) {
  for (const char* const suffix : {".gz", ""}) {
    std::error_code ignored;
    if (fs::path path = folder / (name + suffix); fs::exists(path, ignored)) return path;
  }
  throw Error(
      fmt::format("Fashion-MNIST was not found: neither {0}.gz nor {0} is in {1}; install "
                  "Debian's package dataset-fashion-mnist, which puts them into "
                  "/usr/share/datasets/fashion-mnist, or set PACELINE_DATA to the directory "
                  "that contains fashion-mnist/",
                  name, folder.string()));
}

at::Tensor read_images(const fs::path& path) {
  at::Tensor images = read_idx(path);
  if (images.scalar_type() != at::kByte || images.dim() != 3 || images.size(1) != kSide ||
      images.size(2) != kSide) {
    throw CorruptFile(
        fmt::format("{}: not images of Fashion-MNIST: the header (at byte 0) declares {} in "
                    "{} dimensions; expected bytes in n x 28 x 28",
                    path.string(), images.dtype().name(), images.dim()));
  }
  return images;
}

at::Tensor read_labels(const fs::path& path, std::int64_t images) {
  constexpr std::ptrdiff_t kHeader = 8;
  at::Tensor labels = read_idx(path);
  if (labels.scalar_type() != at::kByte || labels.dim() != 1 || labels.size(0) != images) {
    throw CorruptFile(
        fmt::format("{}: not labels of Fashion-MNIST: the header (at byte 0) must declare bytes "
                    "in one dimension, {} of them, as many as there are images",
                    path.string(), images));
  }
  const std::span values(labels.const_data_ptr<std::uint8_t>(), static_cast<std::size_t>(images));
  const auto bad =
      std::ranges::find_if(values, [](std::uint8_t value) { return value >= kClasses; });
  if (bad != values.end()) {
    throw CorruptFile(
        fmt::format("{}: the label {} is not a class from 0 to {} (at byte {} of the "
                    "uncompressed data)",
                    path.string(), *bad, kClasses - 1, kHeader + (bad - values.begin())));
  }
  return labels;
}

}  // namespace

fs::path default_root() {
  return base::environment().data_root.value_or("/usr/share/datasets");
}

FashionMnist::FashionMnist(const fs::path& root, Split split) {
  const fs::path folder = root / "fashion-mnist";
  const std::string prefix = split == Split::train ? "train" : "t10k";
  images_ = read_images(find_file(folder, prefix + "-images-idx3-ubyte"));
  labels_ = read_labels(find_file(folder, prefix + "-labels-idx1-ubyte"), images_.size(0));
}

FashionMnist::Sample FashionMnist::get(std::int64_t index) const {
  const auto [images, labels] = get_batch(std::array{index});
  return {images[0], *labels.const_data_ptr<std::int64_t>()};
}

FashionMnist::Batch FashionMnist::get_batch(std::span<const std::int64_t> indices) const {
  return ByteSamples{"Fashion-MNIST", images_, labels_}.gather(indices, 1, kSide);
}

}  // namespace paceline::data
