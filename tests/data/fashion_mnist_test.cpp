#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>

#include <paceline/data_loader.h>
#include <paceline/datasets.h>
#include <paceline/error.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "support/temporary_directory.h"

namespace paceline::data {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using ::testing::ThrowsMessage;
namespace fs = std::filesystem;

void write(const fs::path& path, const std::vector<std::uint8_t>& bytes) {
  fs::create_directories(path.parent_path());
  std::ofstream(path).write(reinterpret_cast<const char*>(bytes.data()), std::ssize(bytes));
}

std::vector<std::uint8_t> images(std::uint8_t count, std::uint8_t side = 28) {
  std::vector<std::uint8_t> bytes = {0, 0, 8, 3, 0, 0, 0, count, 0, 0, 0, side, 0, 0, 0, side};
  for (int i = 0; i < count * side * side; ++i) bytes.push_back(static_cast<std::uint8_t>(i % 256));
  return bytes;
}

std::vector<std::uint8_t> labels(const std::vector<std::uint8_t>& values) {
  std::vector<std::uint8_t> bytes = {0, 0, 8, 1, 0, 0, 0, static_cast<std::uint8_t>(values.size())};
  for (const std::uint8_t value : values) bytes.push_back(value);
  return bytes;
}

class SmallFashionMnist : public ::testing::Test {
 protected:
  void write_files(const std::vector<std::uint8_t>& image_file,
                   const std::vector<std::uint8_t>& label_file) {
    write(root() / "fashion-mnist" / "t10k-images-idx3-ubyte", image_file);
    write(root() / "fashion-mnist" / "t10k-labels-idx1-ubyte", label_file);
  }
  void expect_corrupt(const std::string& reason) {
    EXPECT_THAT([&] { FashionMnist(root(), Split::test); },
                ThrowsMessage<CorruptFile>(AllOf(HasSubstr(root().string()), HasSubstr(reason))));
  }
  const fs::path& root() const { return directory_.path(); }

 private:
  test::TemporaryDirectory directory_;
};

TEST_F(SmallFashionMnist, ScalesPixelsAndKeepsLabels) {
  write_files(images(3), labels({7, 0, 9}));
  const FashionMnist set(root(), Split::test);
  ASSERT_EQ(set.size(), 3);
  const auto [image, label] = set.get(2);
  EXPECT_EQ(label, 9);
  EXPECT_EQ(image.sizes(), at::IntArrayRef({1, 28, 28}));
  for (int i = 0; i < 784; ++i) {
    const auto byte = static_cast<float>((2 * 784 + i) % 256);
    ASSERT_EQ(image.const_data_ptr<float>()[i], byte / 255) << i;
  }
}

TEST_F(SmallFashionMnist, BatchEqualsStackedSamples) {
  write_files(images(3), labels({7, 0, 9}));
  const FashionMnist set(root(), Split::test);
  const auto [x, y] = set.get_batch(std::array<std::int64_t, 3>{2, 0, 2});
  const auto [stacked, classes] = DefaultCollate()(std::vector{set.get(2), set.get(0), set.get(2)});
  EXPECT_TRUE(x.equal(stacked));
  EXPECT_TRUE(y.equal(classes));
  EXPECT_TRUE(y.equal(at::tensor({9, 7, 9}, at::kLong)));
}

TEST_F(SmallFashionMnist, RejectsAnIndexOutOfRange) {
  write_files(images(3), labels({7, 0, 9}));
  const FashionMnist set(root(), Split::test);
  EXPECT_THAT([&] { set.get(3); },
              ThrowsMessage<UsageError>(HasSubstr("has 3 samples, so there is no sample 3")));
  EXPECT_THAT([&] { set.get(-1); }, ThrowsMessage<UsageError>(HasSubstr("no sample -1")));
}

TEST_F(SmallFashionMnist, MissingFilesNameTheFolderAndThePackage) {
  EXPECT_THAT(
      [&] { FashionMnist(root(), Split::train); },
      ThrowsMessage<Error>(AllOf(
          HasSubstr("train-images-idx3-ubyte.gz"), HasSubstr((root() / "fashion-mnist").string()),
          HasSubstr("package dataset-fashion-mnist"), HasSubstr("PACELINE_DATA"))));
}

TEST_F(SmallFashionMnist, RejectsImagesAndLabelsThatDoNotMatch) {
  write_files(images(3), labels({7, 0}));
  expect_corrupt("3 of them");
  write_files(images(3, 27), labels({7, 0, 9}));
  expect_corrupt("not images of Fashion-MNIST");
  write_files(labels({7, 0, 9}), labels({7, 0, 9}));
  expect_corrupt("not images of Fashion-MNIST");
  write_files(images(3), labels({7, 10, 9}));
  expect_corrupt("the label 10 is not a class from 0 to 9 (at byte 9");
  write_files(images(3), images(3));
  expect_corrupt("t10k-labels");
}

TEST_F(SmallFashionMnist, RejectsADamagedFile) {
  auto file = images(3);
  file.pop_back();
  write_files(file, labels({7, 0, 9}));
  expect_corrupt("at byte");
}

TEST(ReadIdx, MakesATensorOfTheFilesTypeAndShape) {
  const test::TemporaryDirectory directory;
  const fs::path path = directory.path() / "numbers";
  write(path, {0, 0, 0x0B, 2, 0, 0, 0, 2, 0, 0, 0, 1, 0x01, 0x00, 0xff, 0xff});
  const at::Tensor tensor = read_idx(path);
  EXPECT_TRUE(tensor.equal(at::tensor({256, -1}, at::kShort).view({2, 1})));
}

TEST(DefaultRoot, IsWherePacelineDataSays) {
  EXPECT_EQ(default_root(), "/tmp/data sets");  // set by CMakeLists.txt for this test
}

// What the authors of Fashion-MNIST publish: sizes, and the same number of samples in each class.
class DebiansFashionMnist : public ::testing::TestWithParam<std::pair<Split, std::int64_t>> {};

TEST_P(DebiansFashionMnist, HasThePublishedSizesAndClasses) {
  const fs::path root = "/usr/share/datasets";
  if (!fs::exists(root / "fashion-mnist")) GTEST_SKIP() << "dataset-fashion-mnist is not installed";
  const auto [split, size] = GetParam();
  const FashionMnist set(root, split);
  EXPECT_EQ(set.size(), size);
  std::map<std::int64_t, std::int64_t> classes;
  DataLoader loader(set, SequentialSampler(size), {.batch_size = 1000, .num_workers = 1});
  for (auto& [x, y] : loader) {
    for (int i = 0; i < 1000; ++i) ++classes[y.const_data_ptr<std::int64_t>()[i]];
  }
  EXPECT_THAT(classes, AllOf(SizeIs(10), Each(::testing::Pair(::testing::_, size / 10))));
}

INSTANTIATE_TEST_SUITE_P(Splits, DebiansFashionMnist,
                         ::testing::Values(std::pair(Split::train, 60000),
                                           std::pair(Split::test, 10000)));

}  // namespace
}  // namespace paceline::data
