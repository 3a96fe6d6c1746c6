#include "checkpoint/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include <paceline/error.h>

namespace paceline::checkpoint {
namespace {

using ::testing::HasSubstr;

const Manifest kManifest{.id = "a1",
                         .step = 100,
                         .world_size = 4,
                         .rank = 3,
                         .metric = 0.5,
                         .threads = 2,
                         .cpu_capability = "AVX2",
                         .files = {{"rank-3.pt", 12, 0xffffffff}}};

std::string refusal_of(const std::string& text) {
  try {
    parse_manifest(text, "run/rank-3.json");
  } catch (const CorruptFile& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Manifest, IsReadAsItIsWritten) {
  const Manifest manifest = parse_manifest(write_manifest(kManifest), "x");
  EXPECT_EQ(manifest.id, "a1");
  EXPECT_EQ(manifest.step, 100);
  EXPECT_EQ(manifest.world_size, 4);
  EXPECT_EQ(manifest.rank, 3);
  EXPECT_EQ(manifest.metric, 0.5);
  EXPECT_EQ(manifest.threads, 2);
  EXPECT_EQ(manifest.cpu_capability, "AVX2");
  ASSERT_EQ(manifest.files.size(), 1U);
  EXPECT_EQ(manifest.files[0].name, "rank-3.pt");
  EXPECT_EQ(manifest.files[0].size, 12U);
  EXPECT_EQ(manifest.files[0].crc32, 0xffffffffU);
  Manifest without = kManifest;
  without.metric.reset();
  EXPECT_FALSE(parse_manifest(write_manifest(without), "x").metric);
}

TEST(Manifest, OfAnEarlierVersionDoesNotSayHowItWasComputed) {
  std::string text = write_manifest(kManifest);
  const std::string line = "  \"threads\": 2,\n";
  ASSERT_NE(text.find(line), std::string::npos);
  text.erase(text.find(line), line.size());
  EXPECT_EQ(parse_manifest(text, "x").threads, 0);
}

TEST(Manifest, IsRefusedIfSomethingIsNotAsItShouldBe) {
  const std::string good = write_manifest(kManifest);
  const auto changed = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    text.replace(text.find(from), from.size(), to);
    return text;
  };
  EXPECT_EQ(refusal_of(good), "accepted");
  const std::vector<std::pair<std::string, std::string>> cases{
      {"", "run/rank-3.json: has no 'version'"},
      {"[]", "has no 'version'"},
      {changed("\"threads\": 2", "\"threads\": -2"), "'threads' is -2, and not an integer from 0"},
      {changed("\"version\": 1", "\"version\": 2"), "is of version 2, and this Paceline reads"},
      {changed("\"step\": 100", "\"step\": -1"), "'step' is -1, and not an integer from 0 to"},
      {changed("\"step\": 100", "\"step\": 18446744073709551615"),
       "'step' is 18446744073709551615"},
      {changed("\"step\": 100", "\"step\": 1.5"), "'step' is 1.5"},
      {changed("\"rank\": 3", "\"rank\": 4"), "'rank' is 4, and not an integer from 0 to 3"},
      {changed("\"world_size\": 4", "\"world_size\": 0"), "'world_size' is 0"},
      {changed("\"metric\": 0.5", "\"metric\": \"good\""), "'metric' is no number"},
      {changed("\"id\": \"a1\"", "\"id\": 1"), "'id' is no text"},
      {changed("\"crc32\": 4294967295", "\"crc32\": 4294967296"), "'crc32' is 4294967296"},
      {changed("rank-3.pt", "../rank-3.pt"), "'../rank-3.pt' is no name of a file"},
      {changed("\"files\": [", "\"files\": 3, \"x\": ["), "'files' is no list"},
      {good.substr(0, good.size() / 2), "has no 'version'"},
  };
  for (const auto& [text, expected] : cases) EXPECT_THAT(refusal_of(text), HasSubstr(expected));
}

}  // namespace
}  // namespace paceline::checkpoint
