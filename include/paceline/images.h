#pragma once

/// @file
/// Images in files, one by one and as a data set.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <paceline/api.h>

namespace paceline::data {

/// What the channels of an image that is read are.
enum class ImageMode {
  grey,  ///< One, brightness.
  rgb    ///< Three: red, green and blue.
};

/// Reads a PNG or JPEG file, which its content tells apart, into a uint8 tensor of shape
/// (channels, height, width), as torchvision.io.read_image does with a mode. The brightness of
/// colours in a PNG file is Pillow's, from which torchvision's may differ by 1.
///
/// Palettes and grey images become what `mode` says. Alpha is dropped; 16 bits are rounded to 8.
/// CMYK is converted, with Adobe's inversion where a file has Adobe's marker. Neither gamma, colour
/// profiles nor the orientation in EXIF data are applied.
///
/// Throws CorruptFile, with the path, if the file is truncated, is damaged so that its decoder
/// fails, or has more than 178,956,970 pixels; Error if it cannot be read; UsageError if
/// Paceline was built without libpng or libjpeg, and the file needs it.
PACELINE_API at::Tensor read_image(const std::filesystem::path& path,
                                   ImageMode mode = ImageMode::rgb);

/// Options of ImageFolder.
struct ImageFolderOptions {
  /// Whether a class may have no images. Otherwise that is an error.
  bool allow_empty = false;
  ImageMode mode = ImageMode::rgb;  ///< The channels of the images.
};

/// The PNG and JPEG files in directories named after their classes, as torchvision's ImageFolder:
///
///     root/cat/1.png
///     root/cat/more/2.jpg
///     root/dog/1.JPEG
///
/// A sample is an image, float32 of shape (channels, height, width) with values in [0, 1], and its
/// class. Images may differ in size: use map with transforms::resize or random_resized_crop.
///
/// Classes are numbered in the order of their names. Samples are in the order of their classes, of
/// their directories and of their names. Links are followed. Files that are no images, by the ends
/// of their names, are ignored.
///
/// The list of files is made at construction, and copies share it. Safe to use from several threads
/// at once; each sample is read when it is asked for.
class PACELINE_API ImageFolder {
 public:
  /// An image and its class.
  using Sample = std::pair<at::Tensor, std::int64_t>;
  /// The file of an image, and its class.
  using File = std::pair<std::filesystem::path, std::int64_t>;

  /// Throws Error if `root` cannot be read, or has no directories, or if a class has no images;
  /// UsageError for an image in another format of torchvision's ImageFolder, such as WebP.
  explicit ImageFolder(const std::filesystem::path& root, const ImageFolderOptions& options = {});

  /// The number of samples.
  std::int64_t size() const { return static_cast<std::int64_t>(files_->size()); }
  /// Reads the sample `index`. Throws UsageError unless 0 <= index < size(), and as read_image.
  Sample get(std::int64_t index) const;

  /// The names of the classes, sorted. A class is its position here.
  const std::vector<std::string>& classes() const { return *classes_; }
  /// The number of each class.
  std::map<std::string, std::int64_t> class_to_idx() const;
  /// The file and the class of each sample.
  const std::vector<File>& samples() const { return *files_; }

 private:
  std::shared_ptr<const std::vector<std::string>> classes_;
  std::shared_ptr<const std::vector<File>> files_;
  ImageMode mode_;
};

}  // namespace paceline::data
