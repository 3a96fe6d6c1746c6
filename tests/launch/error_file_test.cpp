#include "launch/error_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <paceline/error.h>

#include "base/unique_fd.h"
#include "support/temporary_directory.h"

namespace paceline::launch {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class ErrorFileTest : public ::testing::Test {
 protected:
  std::optional<ErrorFile> read(const std::string& content) const {
    std::ofstream(path_) << content;
    return read_error_file(path_);
  }
  test::TemporaryDirectory directory_;
  std::filesystem::path path_ = directory_.path() / "error.json";
};

TEST_F(ErrorFileTest, InMemoryRoundTrips) {
  const base::UniqueFd memory = make_error_memory();
  const auto path = error_memory_path(memory.get());
  EXPECT_TRUE(is_error_memory(memory.get()));
  EXPECT_FALSE(is_error_memory(STDERR_FILENO));
  EXPECT_FALSE(is_error_memory(-1));
  EXPECT_FALSE(read_error_file(path));
  for (const std::string text : {"a long text", "short"}) {
    write_error_file(path, {text});
    EXPECT_EQ(read_error_file(path).value().message, text);
  }
}

TEST_F(ErrorFileTest, RoundTrips) {
  write_error_file(path_, {"line 1\n\"quoted\" \xff not UTF-8", {70, 3, 1023}});
  const auto error = read_error_file(path_);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->message, "line 1\n\"quoted\" \xEF\xBF\xBD not UTF-8");
  EXPECT_THAT(error->blamed_ranks, ElementsAre(70, 3, 1023));
  EXPECT_FALSE(error->is_timeout);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory_.path()), {}), 1);
}

TEST_F(ErrorFileTest, TellsATimeout) {
  write_error_file(path_, {.message = "late", .blamed_ranks = {2}, .is_timeout = true});
  EXPECT_TRUE(read_error_file(path_).value().is_timeout);
}

// Each byte of the first one takes six in JSON.
TEST_F(ErrorFileTest, HasTheBeginningOfALongMessage) {
  for (const char byte : {'\1', 'x'}) {
    write_error_file(path_, {std::string(std::size_t{3} << 20, byte), {1}});
    const auto error = read_error_file(path_);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->message, std::string(1 << 16, byte));
    EXPECT_THAT(error->blamed_ranks, ElementsAre(1));
  }
}

TEST_F(ErrorFileTest, TellsTheNode) {
  write_error_file(path_, {"x"}, 3);
  std::ifstream file(path_);
  EXPECT_THAT(std::string(std::istreambuf_iterator<char>(file), {}), HasSubstr("\"node\":3"));
}

TEST_F(ErrorFileTest, ReadsTorchrunsForms) {
  const auto full =
      read(R"({"message": {"message": "RuntimeError: x", "extraInfo": {"py_callstack": "...", )"
           R"("timestamp": "1732183701"}}})");
  ASSERT_TRUE(full);
  EXPECT_EQ(full->message, "RuntimeError: x");
  EXPECT_THAT(full->blamed_ranks, IsEmpty());
  ASSERT_TRUE(read(R"({"message": "just text"})"));
  EXPECT_EQ(read(R"({"message": "just text"})")->message, "just text");
}

TEST_F(ErrorFileTest, IgnoresGarbage) {
  EXPECT_FALSE(read_error_file(path_));
  const std::string whole = R"({"message": {"message": "m", "extraInfo": {"timestamp": "1"}}})";
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_FALSE(read(whole.substr(0, size))) << size;
  }
  for (const char* content : {"[]", "7", "\"text\"", "{\"message\": 3}", "{\"message\": {}}",
                              "{\"message\": {\"message\": []}}", "\xff\xfe\x00"}) {
    EXPECT_FALSE(read(content)) << content;
  }
  EXPECT_FALSE(read(std::string(100'000, '[')));
  EXPECT_FALSE(read(R"({"message": ")" + std::string(2 << 20, 'x') + "\"}"));
}

TEST_F(ErrorFileTest, IgnoresInvalidBlame) {
  const auto error = read(
      R"({"message": {"message": "m", "extraInfo": {"blamed_ranks": [1, "2", null, -5, -1, 99999999999]}}})");
  ASSERT_TRUE(error);
  EXPECT_EQ(error->message, "m");
  EXPECT_THAT(error->blamed_ranks, ElementsAre(1, kUnknownRank));
}

TEST_F(ErrorFileTest, DoesNotBlockOnFifosOrDirectories) {
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  EXPECT_FALSE(read_error_file(path_));
  EXPECT_FALSE(read_error_file(directory_.path()));
}

TEST_F(ErrorFileTest, NamesAPathThatCannotBeWritten) {
  try {
    write_error_file(directory_.path() / "no" / "x.json", {"m"});
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("no/x.json"));
    EXPECT_THAT(error.what(), HasSubstr("ENOENT"));
  }
}

}  // namespace
}  // namespace paceline::launch
