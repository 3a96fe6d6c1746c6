#pragma once

/// @file
/// Files of data, and Fashion-MNIST.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <span>
#include <utility>

#include <paceline/api.h>

namespace paceline::data {

/// The directory of data sets: the environment variable PACELINE_DATA if it is set, otherwise
/// /usr/share/datasets, where Debian's packages install them.
PACELINE_API std::filesystem::path default_root();

/// Reads a file in the IDX format, plain or compressed by gzip, into a CPU tensor of the file's
/// type and shape. Throws CorruptFile, with the path and the byte offset, if the file is not
/// exactly one array, and Error if it cannot be read.
PACELINE_API at::Tensor read_idx(const std::filesystem::path& path);

/// Which part of a data set.
enum class Split {
  train,  ///< The training set.
  test    ///< The test set.
};

/// Zalando's Fashion-MNIST: 28 x 28 grey images of ten kinds of clothes, 60,000 for training and
/// 10,000 for tests. Debian's package dataset-fashion-mnist provides it.
///
/// A sample is an image, float32 of shape (1, 28, 28), and its class from 0 to 9. As torchvision's
/// ToTensor does, pixels are scaled from bytes to [0, 1] and not normalized further.
///
/// The images are held as bytes (47 MB for the training set), which copies share. Safe to use from
/// several threads at once.
class PACELINE_API FashionMnist {
 public:
  /// An image and its class.
  using Sample = std::pair<at::Tensor, std::int64_t>;
  /// Images and their classes.
  using Batch = std::pair<at::Tensor, at::Tensor>;

  /// Reads {train,t10k}-{images-idx3,labels-idx1}-ubyte, with or without .gz, from
  /// `root`/fashion-mnist. Throws Error if they do not exist, CorruptFile if they are incomplete or
  /// do not belong together.
  explicit FashionMnist(const std::filesystem::path& root = default_root(),
                        Split split = Split::train);

  /// The number of samples.
  std::int64_t size() const { return labels_.size(0); }
  /// The sample `index`. Throws UsageError unless 0 <= index < size().
  Sample get(std::int64_t index) const;
  /// The samples of n indices, stacked: images of shape (n, 1, 28, 28) and int64 classes of shape
  /// (n). Throws UsageError as get does.
  Batch get_batch(std::span<const std::int64_t> indices) const;

 private:
  at::Tensor images_;  // uint8, (size, 28, 28)
  at::Tensor labels_;  // uint8, (size)
};

}  // namespace paceline::data
