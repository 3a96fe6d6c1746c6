#include <ATen/TensorOperators.h>
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>

#include <paceline/error.h>
#include <paceline/images.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "support/image_files.h"
#include "support/temporary_directory.h"

namespace paceline::data {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
using ::testing::StartsWith;
using ::testing::ThrowsMessage;
namespace fs = std::filesystem;

unsigned sample(int x, int y, int channel) {
  return static_cast<unsigned>(x * 50 + y * 20 + channel * 7);
}

class Images : public ::testing::Test {
 protected:
  fs::path path(const std::string& name) const { return root() / name; }
  const fs::path& root() const { return directory_.path(); }
  void write(const std::string& name, const test::Bytes& bytes = small_png()) const {
    fs::create_directories(path(name).parent_path());
    std::ofstream(path(name)).write(reinterpret_cast<const char*>(bytes.data()), std::ssize(bytes));
  }
  static test::Bytes small_png() { return test::make_png({.width = 4, .height = 3}, sample); }

  // The paths below the root, with their classes.
  std::vector<std::pair<std::string, std::int64_t>> files_of(const ImageFolder& set) const {
    std::vector<std::pair<std::string, std::int64_t>> files;
    for (const auto& [file, label] : set.samples()) {
      files.emplace_back(fs::relative(file, root()).string(), label);
    }
    return files;
  }

 private:
  test::TemporaryDirectory directory_;
};

TEST_F(Images, AreReadAsChannelsRowsAndColumns) {
  write("a.png");
  const at::Tensor rgb = read_image(path("a.png"));
  ASSERT_EQ(rgb.sizes(), at::IntArrayRef({3, 3, 4}));
  ASSERT_EQ(rgb.scalar_type(), at::kByte);
  ASSERT_TRUE(rgb.is_contiguous());
  for (int y = 0; y < 3; ++y) {
    for (int x = 0; x < 4; ++x) {
      for (int c = 0; c < 3; ++c) EXPECT_EQ(rgb[c][y][x].item<int>(), sample(x, y, c) & 255U);
    }
  }
  EXPECT_EQ(read_image(path("a.png"), ImageMode::grey).sizes(), at::IntArrayRef({1, 3, 4}));
}

TEST_F(Images, NameTheFileThatCannotBeRead) {
  EXPECT_THAT([&] { static_cast<void>(read_image(path("none.png"))); },
              ThrowsMessage<Error>(AllOf(HasSubstr("none.png"), HasSubstr("ENOENT"))));
  auto bytes = small_png();
  bytes.resize(50);
  write("short.png", bytes);
  EXPECT_THAT([&] { static_cast<void>(read_image(path("short.png"))); },
              ThrowsMessage<CorruptFile>(StartsWith(path("short.png").string() + ": ")));
}

TEST_F(Images, OfAFolderAreSortedByClassDirectoryAndName) {
  for (const char* const name : {"dog/b.png", "dog/a.JPG", "cat/z/more/1.png", "cat/z/1.png",
                                 "cat/z.x/1.png", "cat/2.jpeg", "cat/10.PnG", "bird/x.png"}) {
    write(name);
  }
  write("cat/readme.txt", {'x'});
  write("top.png");
  fs::create_directory(path("dog/d.png"));
  const ImageFolder set(root());
  EXPECT_THAT(set.classes(), ElementsAre("bird", "cat", "dog"));
  EXPECT_THAT(set.class_to_idx(), ElementsAre(Pair("bird", 0), Pair("cat", 1), Pair("dog", 2)));
  EXPECT_THAT(files_of(set),
              ElementsAre(Pair("bird/x.png", 0), Pair("cat/10.PnG", 1), Pair("cat/2.jpeg", 1),
                          Pair("cat/z/1.png", 1), Pair("cat/z.x/1.png", 1),
                          Pair("cat/z/more/1.png", 1), Pair("dog/a.JPG", 2), Pair("dog/b.png", 2)));
  EXPECT_EQ(set.size(), 8);
}

TEST_F(Images, OfAFolderFollowLinks) {
  write("elsewhere/1.png");
  fs::create_directories(path("set/cat"));
  fs::create_directory_symlink(path("elsewhere"), path("set/cat/linked"));
  fs::create_directory_symlink(path("elsewhere"), path("set/dog"));
  EXPECT_EQ(ImageFolder(path("set")).size(), 2);
}

TEST_F(Images, OfAFolderAreFloats) {
  write("cat/1.png");
  write("dog/1.jpg", test::make_jpeg({.width = 9, .height = 5}, [](int, int, int) { return 51U; }));
  const ImageFolder set(root());
  const auto [cat, label] = set.get(0);
  EXPECT_EQ(label, 0);
  EXPECT_TRUE(cat.equal(read_image(path("cat/1.png")).to(at::kFloat) / 255));
  const auto [dog, dog_label] = set.get(1);
  EXPECT_EQ(dog_label, 1);
  EXPECT_EQ(dog.sizes(), at::IntArrayRef({3, 5, 9}));
  EXPECT_NEAR(dog[1][2][3].item<float>(), 0.2, 0.01);
  EXPECT_EQ(ImageFolder(root(), {.mode = ImageMode::grey}).get(1).first.sizes(),
            at::IntArrayRef({1, 5, 9}));
  EXPECT_THAT([&] { static_cast<void>(set.get(2)); },
              ThrowsMessage<UsageError>(HasSubstr("no sample 2")));
}

TEST_F(Images, OfAFolderNeedAClass) {
  write("1.png");
  EXPECT_THAT([&] { ImageFolder set(root()); },
              ThrowsMessage<Error>(HasSubstr("has no directories")));
  EXPECT_THAT(
      [&] { ImageFolder set(path("none")); },
      ThrowsMessage<Error>(AllOf(HasSubstr(path("none").string()), HasSubstr("No such file"))));
}

TEST_F(Images, OfAFolderNeedOneInEachClass) {
  write("cat/1.png");
  write("dog/1.txt");
  EXPECT_THAT([&] { ImageFolder set(root()); },
              ThrowsMessage<Error>(
                  AllOf(HasSubstr("the class dog has no images"), HasSubstr("allow_empty"))));
  const ImageFolder set(root(), {.allow_empty = true});
  EXPECT_THAT(set.classes(), ElementsAre("cat", "dog"));
  EXPECT_EQ(set.size(), 1);
}

TEST_F(Images, OfAFolderMustHaveAFormatThatIsRead) {
  write("cat/1.png");
  write("cat/2.WebP");
  EXPECT_THAT([&] { ImageFolder set(root()); },
              ThrowsMessage<UsageError>(HasSubstr("2.WebP is neither")));
}

}  // namespace
}  // namespace paceline::data
