#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>

#include <paceline/datasets.h>
#include <paceline/error.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "support/temporary_directory.h"

namespace paceline::data {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using ::testing::ThrowsMessage;
namespace fs = std::filesystem;

constexpr std::int64_t kPixels = 3 * 32 * 32;

std::uint8_t pixel(std::int64_t image, std::int64_t i) {
  return static_cast<std::uint8_t>(image * 31 + i * 7 + i / 256);
}

// A record of each element of `labels`, and the number of the first image.
std::vector<std::uint8_t> records(const std::vector<std::vector<std::uint8_t>>& labels, int first) {
  std::vector<std::uint8_t> bytes;
  for (const auto& of_record : labels) {
    bytes.insert(bytes.end(), of_record.begin(), of_record.end());
    for (std::int64_t i = 0; i < kPixels; ++i) bytes.push_back(pixel(first, i));
    ++first;
  }
  return bytes;
}

class Cifar : public ::testing::Test {
 protected:
  fs::path path(const std::string& name) const { return root() / name; }
  void write(const std::string& name, const std::vector<std::uint8_t>& bytes) const {
    fs::create_directories(path(name).parent_path());
    std::ofstream(path(name)).write(reinterpret_cast<const char*>(bytes.data()), std::ssize(bytes));
  }
  const fs::path& root() const { return directory_.path(); }

  static void expect_image(const at::Tensor& image, std::int64_t number) {
    ASSERT_EQ(image.sizes(), at::IntArrayRef({3, 32, 32}));
    const at::Tensor flat = image.contiguous();
    for (std::int64_t i = 0; i < kPixels; ++i) {
      ASSERT_EQ(flat.const_data_ptr<float>()[i], static_cast<float>(pixel(number, i)) / 255) << i;
    }
  }

 private:
  test::TemporaryDirectory directory_;
};

TEST_F(Cifar, TenHasTheFiveFilesOfTheTrainingSet) {
  for (int i = 0; i < 5; ++i) {
    const auto label = static_cast<std::uint8_t>(2 * i);
    write("cifar-10-batches-bin/data_batch_" + std::to_string(i + 1) + ".bin",
          records({{label}, {9}}, 2 * i));
  }
  const Cifar10 set(root());
  ASSERT_EQ(set.size(), 10);
  for (std::int64_t i = 0; i < 10; ++i) {
    const auto [image, label] = set.get(i);
    EXPECT_EQ(label, i % 2 == 0 ? i : 9);
    expect_image(image, i);
  }
  EXPECT_THAT([&] { Cifar10(root(), Split::test); },
              ThrowsMessage<Error>(AllOf(HasSubstr("test_batch.bin does not exist"),
                                         HasSubstr("unpack cifar-10-binary.tar.gz"))));
}

TEST_F(Cifar, TenMakesBatches) {
  write("cifar-10-batches-bin/test_batch.bin", records({{4}, {0}, {7}}, 0));
  const Cifar10 set(root(), Split::test);
  const auto [images, labels] = set.get_batch(std::array<std::int64_t, 3>{2, 0, 2});
  EXPECT_TRUE(labels.equal(at::tensor({7, 4, 7}, at::kLong)));
  expect_image(images[0], 2);
  expect_image(images[1], 0);
  for (const std::int64_t index : {-1, 3}) {
    EXPECT_THAT([&] { static_cast<void>(set.get(index)); },
                ThrowsMessage<UsageError>(HasSubstr("no sample " + std::to_string(index))));
  }
}

TEST_F(Cifar, HundredHasFineOrCoarseLabels) {
  write("cifar-100-binary/train.bin", records({{19, 99}, {3, 0}}, 0));
  write("cifar-100-binary/test.bin", records({{1, 2}}, 5));
  const Cifar100 fine(root());
  EXPECT_EQ(fine.get(0).second, 99);
  expect_image(fine.get(1).first, 1);
  const Cifar100 coarse(root(), Split::train, {.coarse_labels = true});
  EXPECT_TRUE(coarse.get_batch(std::array<std::int64_t, 2>{1, 0})
                  .second.equal(at::tensor({3, 19}, at::kLong)));
  expect_image(Cifar100(root(), Split::test).get(0).first, 5);
}

TEST_F(Cifar, RejectsAnIncompleteRecord) {
  auto bytes = records({{4}, {0}}, 0);
  const std::string name = "cifar-10-batches-bin/test_batch.bin";
  const auto expect = [&](const std::string& offset) {
    write(name, bytes);
    EXPECT_THAT([&] { Cifar10(root(), Split::test); },
                ThrowsMessage<CorruptFile>(
                    AllOf(StartsWith(path(name).string() + ": "), HasSubstr(offset))));
  };
  bytes.pop_back();
  expect("at byte 3073)");
  bytes.resize(100);
  expect("at byte 0)");
  bytes.clear();
  expect("at byte 0)");
}

TEST_F(Cifar, RejectsALabelOutOfRange) {
  write("cifar-10-batches-bin/test_batch.bin", records({{4}, {10}}, 0));
  EXPECT_THAT([&] { Cifar10(root(), Split::test); },
              ThrowsMessage<CorruptFile>(
                  HasSubstr("the label 10 is not a class from 0 to 9 (at byte 3073)")));
  write("cifar-100-binary/test.bin", records({{0, 0}, {19, 100}}, 0));
  EXPECT_THAT([&] { Cifar100(root(), Split::test); },
              ThrowsMessage<CorruptFile>(
                  HasSubstr("the label 100 is not a class from 0 to 99 (at byte 3075)")));
  write("cifar-100-binary/test.bin", records({{20, 0}}, 0));
  EXPECT_THAT([&] { Cifar100(root(), Split::test); },
              ThrowsMessage<CorruptFile>(
                  HasSubstr("the label 20 is not a class from 0 to 19 (at byte 0)")));
}

}  // namespace
}  // namespace paceline::data
