#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>

#include <paceline/error.h>
#include <paceline/token_dataset.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <vector>

#include "support/temporary_directory.h"

namespace paceline::data {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using ::testing::ThrowsMessage;

class Tokens : public ::testing::Test {
 protected:
  // Little-endian, `size` bytes each.
  void write(const std::vector<std::uint32_t>& tokens, unsigned size) const {
    std::ofstream file(path());
    for (const std::uint32_t token : tokens) {
      for (unsigned byte = 0; byte < size; ++byte) file.put(static_cast<char>(token >> 8 * byte));
    }
  }
  void append(const char* bytes) const { std::ofstream(path(), std::ios::app) << bytes; }
  std::filesystem::path path() const { return directory_.path() / "train.bin"; }

  static void expect_sample(const TokenDataset& set, std::int64_t index,
                            const std::vector<std::int64_t>& x,
                            const std::vector<std::int64_t>& y) {
    const auto sample = set.get(index);
    EXPECT_TRUE(sample.first.equal(at::tensor(x))) << sample.first;
    EXPECT_TRUE(sample.second.equal(at::tensor(y))) << sample.second;
  }

 private:
  test::TemporaryDirectory directory_;
};

TEST_F(Tokens, AreBlocksAndTheNextTokens) {
  write({0, 1, 258, 65535, 4, 5, 6, 7, 8}, 2);
  const TokenDataset set(path(), {.block_size = 3});
  EXPECT_EQ(set.tokens(), 9);
  ASSERT_EQ(set.size(), 2);  // 9 tokens, of which a third block would need 10
  expect_sample(set, 0, {0, 1, 258}, {1, 258, 65535});
  expect_sample(set, 1, {65535, 4, 5}, {4, 5, 6});
  append("ab");
  ASSERT_EQ(TokenDataset(path(), {.block_size = 3}).size(), 3);
}

TEST_F(Tokens, BeginAStrideApart) {
  write({0, 1, 2, 3, 4, 5, 6, 7}, 2);
  const TokenDataset overlapping(path(), {.block_size = 4, .stride = 1});
  ASSERT_EQ(overlapping.size(), 4);
  expect_sample(overlapping, 3, {3, 4, 5, 6}, {4, 5, 6, 7});
  const TokenDataset apart(path(), {.block_size = 2, .stride = 5});
  ASSERT_EQ(apart.size(), 2);
  expect_sample(apart, 1, {5, 6}, {6, 7});
}

TEST_F(Tokens, MayHaveFourBytes) {
  write({70000, 0xffffffffU, 3}, 4);
  const TokenDataset set(path(), {.block_size = 2, .dtype = at::kUInt32});
  ASSERT_EQ(set.size(), 1);
  expect_sample(set, 0, {70000, 0xffffffffLL}, {0xffffffffLL, 3});
}

TEST_F(Tokens, ComeInBatches) {
  write({0, 1, 2, 3, 4, 5, 6, 7, 8}, 2);
  const TokenDataset set(path(), {.block_size = 2});
  const TokenDataset copy = set;
  const auto [x, y] = copy.get_batch(std::array<std::int64_t, 3>{3, 0, 3});
  EXPECT_TRUE(x.equal(at::tensor({6, 7, 0, 1, 6, 7}, at::kLong).view({3, 2})));
  EXPECT_TRUE(y.equal(at::tensor({7, 8, 1, 2, 7, 8}, at::kLong).view({3, 2})));
  EXPECT_THAT([&] { static_cast<void>(set.get(4)); },
              ThrowsMessage<UsageError>(HasSubstr("has 4 samples, so there is no sample 4")));
  EXPECT_THROW(static_cast<void>(set.get(-1)), UsageError);
}

TEST_F(Tokens, AreCorruptIfTheLastOneIsIncomplete) {
  write({0, 1, 2, 3}, 2);
  append("a");
  EXPECT_THAT([&] { TokenDataset(path(), {.block_size = 1}); },
              ThrowsMessage<CorruptFile>(
                  AllOf(StartsWith(path().string() + ": "), HasSubstr("at byte 8"))));
  write({0, 1, 2}, 2);
  EXPECT_THROW(TokenDataset(path(), {.block_size = 1, .dtype = at::kUInt32}), CorruptFile);
}

TEST_F(Tokens, NeedAWholeSample) {
  write({0, 1, 2, 3}, 2);
  EXPECT_EQ(TokenDataset(path(), {.block_size = 3}).size(), 1);
  EXPECT_THAT([&] { TokenDataset(path(), {.block_size = 4}); },
              ThrowsMessage<UsageError>(HasSubstr("has 4 tokens")));
  write({}, 2);
  EXPECT_THROW(TokenDataset(path(), {.block_size = 1}), UsageError);
}

TEST_F(Tokens, RejectInvalidOptions) {
  write({0, 1, 2, 3}, 2);
  const auto expect = [&](const char* reason, const TokenDatasetOptions& options) {
    EXPECT_THAT([&] { TokenDataset(path(), options); },
                ThrowsMessage<UsageError>(HasSubstr(reason)));
  };
  expect("block_size is 0", {.block_size = 0});
  expect("stride is 0", {.block_size = 1, .stride = 0});
  expect("dtype is Long", {.block_size = 1, .dtype = at::kLong});
  EXPECT_THAT([&] { TokenDataset("/no/such/file"); }, ThrowsMessage<Error>(HasSubstr("ENOENT")));
}

}  // namespace
}  // namespace paceline::data
