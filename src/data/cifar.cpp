#include <ATen/ops/from_blob.h>
#include <fmt/format.h>

#include <paceline/datasets.h>
#include <paceline/error.h>

#include <array>
#include <initializer_list>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "base/input_file.h"
#include "data/byte_samples.h"

namespace paceline::data {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kCifarSide = 32;
constexpr std::int64_t kCifarPixels = 3 * kCifarSide * kCifarSide;

// One of the two data sets. A record has its labels, a byte each, and then its pixels.
struct CifarFormat {
  const char* name;
  const char* archive;
  std::vector<int> classes;  // how many each label has

  std::int64_t label_count() const { return static_cast<std::int64_t>(classes.size()); }
  std::int64_t record_size() const { return label_count() + kCifarPixels; }
};

const CifarFormat& cifar10() {
  static const CifarFormat format{"CIFAR-10", "cifar-10-binary.tar.gz", {10}};
  return format;
}

const CifarFormat& cifar100() {
  static const CifarFormat format{"CIFAR-100", "cifar-100-binary.tar.gz", {20, 100}};
  return format;
}

void check_labels(const CifarFormat& format, std::span<const std::uint8_t> records,
                  const fs::path& path) {
  const auto record_size = static_cast<std::size_t>(format.record_size());
  for (std::size_t begin = 0; begin < records.size(); begin += record_size) {
    for (std::size_t i = 0; i < format.classes.size(); ++i) {
      if (records[begin + i] < format.classes[i]) continue;
      throw CorruptFile(fmt::format("{}: the label {} is not a class from 0 to {} (at byte {})",
                                    path.string(), records[begin + i], format.classes[i] - 1,
                                    begin + i));
    }
  }
}

// Appends the file's records.
void read_cifar_file(const CifarFormat& format, const fs::path& path,
                     std::vector<std::uint8_t>& records) {
  std::error_code ignored;
  if (!fs::exists(path, ignored)) {
    throw Error(fmt::format(
        "{} was not found: {} does not exist; unpack {} of "
        "https://www.cs.toronto.edu/~kriz/cifar.html in {}",
        format.name, path.string(), format.archive, path.parent_path().parent_path().string()));
  }
  base::InputFile file(path);
  const std::size_t begin = records.size();
  file.read(records, file.size());
  const std::size_t size = records.size() - begin;
  const auto record_size = static_cast<std::size_t>(format.record_size());
  if (size == 0 || size % record_size != 0) {
    throw CorruptFile(
        fmt::format("{}: not whole records of {}, of {} bytes each: the last one is "
                    "incomplete (at byte {})",
                    path.string(), format.name, record_size, size - size % record_size));
  }
  check_labels(format, std::span(records).subspan(begin), path);
}

at::Tensor read_cifar(const CifarFormat& format, const fs::path& folder,
                      std::initializer_list<const char*> names) {
  auto records = std::make_shared<std::vector<std::uint8_t>>();
  for (const char* const name : names) read_cifar_file(format, folder / name, *records);
  const std::int64_t count = std::ssize(*records) / format.record_size();
  return at::from_blob(
      records->data(), {count, format.record_size()},
      [records](void*) {},  // the tensor keeps it alive
      at::TensorOptions(at::kByte));
}

Cifar10::Batch gather_cifar(const CifarFormat& format, const at::Tensor& records,
                            std::int64_t label_column, std::span<const std::int64_t> indices) {
  return ByteSamples{format.name, records.narrow(1, format.label_count(), kCifarPixels),
                     records.select(1, label_column)}
      .gather(indices, 3, kCifarSide);
}

// The only sample of a batch.
Cifar10::Sample sample_of(const Cifar10::Batch& batch) {
  return {batch.first[0], *batch.second.const_data_ptr<std::int64_t>()};
}

}  // namespace

Cifar10::Cifar10(const fs::path& root, Split split) {
  const fs::path folder = root / "cifar-10-batches-bin";
  records_ = split == Split::test
                 ? read_cifar(cifar10(), folder, {"test_batch.bin"})
                 : read_cifar(cifar10(), folder,
                              {"data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin",
                               "data_batch_4.bin", "data_batch_5.bin"});
}

Cifar10::Sample Cifar10::get(std::int64_t index) const {
  return sample_of(get_batch(std::array{index}));
}

Cifar10::Batch Cifar10::get_batch(std::span<const std::int64_t> indices) const {
  return gather_cifar(cifar10(), records_, 0, indices);
}

Cifar100::Cifar100(const fs::path& root, Split split, const Cifar100Options& options)
    : records_(read_cifar(cifar100(), root / "cifar-100-binary",
                          {split == Split::test ? "test.bin" : "train.bin"})),
      label_column_(options.coarse_labels ? 0 : 1) {}

Cifar100::Sample Cifar100::get(std::int64_t index) const {
  return sample_of(get_batch(std::array{index}));
}

Cifar100::Batch Cifar100::get_batch(std::span<const std::int64_t> indices) const {
  return gather_cifar(cifar100(), records_, label_column_, indices);
}

}  // namespace paceline::data
