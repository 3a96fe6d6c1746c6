#pragma once

/// @file
/// Files of data, Fashion-MNIST and CIFAR.

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

/// CIFAR-10: 32 x 32 colour images of ten classes, 50,000 for training and 10,000 for tests, in the
/// binary version of https://www.cs.toronto.edu/~kriz/cifar.html.
///
/// A sample is an image, float32 of shape (3, 32, 32) with values in [0, 1] as torchvision's
/// ToTensor makes it, and its class from 0 to 9.
///
/// The images are held as bytes (154 MB for the training set), which copies share. Safe to use from
/// several threads at once.
class PACELINE_API Cifar10 {
 public:
  /// An image and its class.
  using Sample = std::pair<at::Tensor, std::int64_t>;
  /// Images and their classes.
  using Batch = std::pair<at::Tensor, at::Tensor>;

  /// Reads data_batch_1.bin to data_batch_5.bin, or test_batch.bin, from
  /// `root`/cifar-10-batches-bin. Throws Error if one cannot be read, CorruptFile if it ends within
  /// a record or a label is wrong.
  explicit Cifar10(const std::filesystem::path& root = default_root(), Split split = Split::train);

  /// The number of samples.
  std::int64_t size() const { return records_.size(0); }
  /// The sample `index`. Throws UsageError unless 0 <= index < size().
  Sample get(std::int64_t index) const;
  /// The samples of n indices, stacked: images of shape (n, 3, 32, 32) and int64 classes of shape
  /// (n). Throws UsageError as get does.
  Batch get_batch(std::span<const std::int64_t> indices) const;

 private:
  at::Tensor records_;  // uint8, (size, 1 + 3 * 32 * 32): the label first
};

/// Options of Cifar100.
struct Cifar100Options {
  /// Whether a sample's class is its superclass, from 0 to 19, such as "trees". Otherwise it is one
  /// of 100, such as "oak".
  bool coarse_labels = false;
};

/// CIFAR-100: as Cifar10, with a hundred classes in twenty superclasses.
class PACELINE_API Cifar100 {
 public:
  /// An image and its class.
  using Sample = std::pair<at::Tensor, std::int64_t>;
  /// Images and their classes.
  using Batch = std::pair<at::Tensor, at::Tensor>;

  /// Reads train.bin or test.bin from `root`/cifar-100-binary. Throws as Cifar10.
  explicit Cifar100(const std::filesystem::path& root = default_root(), Split split = Split::train,
                    const Cifar100Options& options = {});

  /// The number of samples.
  std::int64_t size() const { return records_.size(0); }
  /// The sample `index`. Throws UsageError unless 0 <= index < size().
  Sample get(std::int64_t index) const;
  /// As Cifar10::get_batch.
  Batch get_batch(std::span<const std::int64_t> indices) const;

 private:
  at::Tensor records_;  // uint8, (size, 2 + 3 * 32 * 32): the superclass and the class first
  std::int64_t label_column_;
};

}  // namespace paceline::data
