#include <paceline/summary_writer.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include <paceline/error.h>

#include "support/temporary_directory.h"
#include "support/torch_ranks.h"
#include "train/event_record.h"

namespace paceline {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::expect_torch_ranks;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using ::testing::ThrowsMessage;

std::vector<json> lines_of(const fs::path& directory) {
  std::ifstream file(directory / "metrics.jsonl");
  std::vector<json> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(json::parse(line));
  return lines;
}

std::size_t event_files(const fs::path& directory) {
  std::size_t count = 0;
  for (const auto& entry : fs::directory_iterator(directory)) {
    if (entry.path().filename().string().starts_with("events.out.tfevents.")) ++count;
  }
  return count;
}

// The values of RFC 3720, appendix B.4, and of the checksum's catalogues.
TEST(Crc32c, IsThatOfTheSpecification) {
  EXPECT_EQ(train::crc32c(""), 0U);
  EXPECT_EQ(train::crc32c("123456789"), 0xe3069283);
  EXPECT_EQ(train::crc32c(std::string(32, '\0')), 0x8a9136aa);
  EXPECT_EQ(train::crc32c(std::string(32, '\xff')), 0x62a8ab43);
}

// python/tests/test_summaries.py reads the event files by TensorBoard.
TEST(SummaryWriter, AppendsLinesOfJson) {
  const test::TemporaryDirectory directory;
  const fs::path path = directory.path() / "runs" / "1";
  for (const int run : {0, 1}) {
    SummaryWriter writer(path);
    writer.add_scalar("loss/\"train\"", 0.1 + run, 10 * run);
    writer.add_scalars(
        {{"a", 1e-300}, {"none", std::nan("")}, {"much", std::numeric_limits<double>::infinity()}},
        10 * run + 1);
    SummaryWriter moved = std::move(writer);
    moved.flush();
    EXPECT_THAT(lines_of(path), SizeIs(2 * (run + 1)));
  }
  EXPECT_EQ(event_files(path), 2U);
  const auto lines = lines_of(path);
  EXPECT_EQ(lines[2].at("step"), 10);
  EXPECT_EQ(lines[2].at("loss/\"train\""), 1.1);
  EXPECT_GT(lines[2].at("time"), 1.7e9);
  EXPECT_EQ(lines[3].at("a"), 1e-300);
  EXPECT_TRUE(lines[3].at("none").is_null());
  EXPECT_TRUE(lines[3].at("much").is_null());
}

TEST(SummaryWriter, FlushesAfterTheInterval) {
  const test::TemporaryDirectory directory;
  SummaryWriter writer(directory.path(), {.flush_interval = std::chrono::milliseconds(0)});
  writer.add_scalar("a", 1, 1);
  EXPECT_THAT(lines_of(directory.path()), SizeIs(1));
  SummaryWriter patient(directory.path(), {.flush_interval = std::chrono::hours(1)});
  patient.add_scalar("a", 1, 2);
  EXPECT_THAT(lines_of(directory.path()), SizeIs(1));
}

TEST(SummaryWriter, WritesWhatIsAskedForOnRankZero) {
  const test::TemporaryDirectory directory;
  expect_torch_ranks(2, "paceline", [&](int rank, int) {
    const fs::path own = directory.path() / std::to_string(rank);
    SummaryWriter(own, {.tensorboard = false}).add_scalar("a", 1, 1);
    EXPECT_EQ(fs::exists(own), rank == 0);
    SummaryWriter(own, {.json_lines = false, .all_ranks = true}).add_scalar("a", 1, 1);
    EXPECT_EQ(event_files(own), 1U);
    EXPECT_THAT(lines_of(own), SizeIs(rank == 0 ? 1 : 0));
  });
}

TEST(SummaryWriter, RefusesWhatItCannotWrite) {
  const test::TemporaryDirectory directory;
  const fs::path file = directory.path() / "file";
  std::ofstream(file) << "no directory";
  EXPECT_THAT([&] { SummaryWriter(file / "runs"); }, ThrowsMessage<Error>(HasSubstr("file/runs")));
  SummaryWriter writer(directory.path());
  EXPECT_THAT([&] { writer.add_scalar("", 1, 1); },
              ThrowsMessage<UsageError>(HasSubstr("a tag is empty")));
  SummaryWriter events(directory.path(), {.json_lines = false});
  for (auto* const one : {&writer, &events}) {
    EXPECT_THAT([&] { one->add_scalar("\xff", 1, 1); },
                ThrowsMessage<UsageError>(HasSubstr("no UTF-8")));
  }
  EXPECT_THAT([&] { writer.add_scalar("time", 1, 1); },
              ThrowsMessage<UsageError>(HasSubstr("'time' is no tag")));
}

}  // namespace
}  // namespace paceline
