#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <span>
#include <utility>

#include <paceline/api.h>

namespace paceline::data {

// Where data sets lie: the environment variable PACELINE_DATA if it is set, otherwise
// /usr/share/datasets, where Debian's packages put them.
PACELINE_API std::filesystem::path default_root();

// Reads a file in the IDX format, plain or compressed by gzip, into a CPU tensor of the file's type
// and shape. Throws CorruptFile, with the path and the byte's offset, if the file is anything but
// one whole array, and Error if it cannot be read.
PACELINE_API at::Tensor read_idx(const std::filesystem::path& path);

enum class Split { train, test };

// Zalando's Fashion-MNIST: 28 x 28 grey images of ten kinds of clothes, 60,000 to train and 10,000
// to test with. Debian's package dataset-fashion-mnist provides it.
//
// A sample is an image, float32 of shape (1, 28, 28), and its class from 0 to 9. Pixels are scaled
// from bytes to [0, 1] and not normalised further, as by torchvision's ToTensor.
//
// Holds the images as bytes (47 MB for the training set). Copies share them. All members may be
// called from several threads at once.
class PACELINE_API FashionMnist {
 public:
  using Sample = std::pair<at::Tensor, std::int64_t>;
  using Batch = std::pair<at::Tensor, at::Tensor>;

  // Reads {train,t10k}-{images-idx3,labels-idx1}-ubyte, with or without .gz, from
  // `root`/fashion-mnist. Throws Error if they are not there, CorruptFile if they are not whole or
  // do not belong together.
  explicit FashionMnist(const std::filesystem::path& root = default_root(),
                        Split split = Split::train);

  std::int64_t size() const { return labels_.size(0); }
  // Throws UsageError unless 0 <= index < size().
  Sample get(std::int64_t index) const;
  // The samples of these indices, stacked: images of shape (n, 1, 28, 28) and int64 classes of
  // shape (n). Throws UsageError as get does.
  Batch get_batch(std::span<const std::int64_t> indices) const;

 private:
  at::Tensor images_;  // uint8, (size, 28, 28)
  at::Tensor labels_;  // uint8, (size)
};

}  // namespace paceline::data
