#include <paceline/config.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include <paceline/error.h>

#include "support/temporary_directory.h"

namespace paceline {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;
using ::testing::ThrowsMessage;

class ConfigTest : public ::testing::Test {
 protected:
  ConfigTest() {
    config_.add("epochs", options_.epochs, "how often the data are seen");
    config_.add("seed", options_.seed);
    config_.add("optimizer.lr", options_.lr);
    config_.add("optimizer.nesterov", options_.nesterov);
    config_.add("data", options_.data);
    config_.add("name", options_.name);
    config_.add("milestones", options_.milestones);
    config_.add("tags", options_.tags);
  }

  std::optional<std::string> parse(std::vector<const char*> arguments) {
    arguments.insert(arguments.begin(), "train");
    return config_.parse(static_cast<int>(arguments.size()), arguments.data());
  }
  void load(const std::string& content) {
    std::ofstream(path_) << content;
    config_.load(path_);
  }
  void expect_refused(const std::string& content, const std::string& why) {
    EXPECT_THAT([&] { load(content); },
                ThrowsMessage<UsageError>(AllOf(StartsWith(path_.string()), HasSubstr(why))))
        << content;
  }
  void expect_flags_refused(const std::vector<const char*>& arguments, const std::string& why) {
    EXPECT_THAT([&] { static_cast<void>(parse(arguments)); },
                ThrowsMessage<UsageError>(HasSubstr(why)));
  }

  struct {
    int epochs = 5;
    std::uint8_t seed = 1;
    double lr = 0.1;
    bool nesterov = false;
    fs::path data = "/data";
    std::string name = "run";
    std::vector<std::int64_t> milestones{30, 60};
    std::vector<std::string> tags{};
  } options_;
  test::TemporaryDirectory directory_;
  fs::path path_ = directory_.path() / "train.yaml";
  Config config_{"Trains a net."};
};

TEST_F(ConfigTest, ReadsAFile) {
  load(
      "# a comment\n"
      "epochs: 10\n"
      "optimizer:\n"
      "  lr: 1e-3\n"
      "  nesterov: true\n"
      "data: /mnt/a b\n"
      "name: \"12: x\"\n"
      "milestones: [1, 2]\n"
      "tags:\n"
      "  - a\n"
      "  - 'b, c'\n");
  EXPECT_EQ(options_.epochs, 10);
  EXPECT_EQ(options_.lr, 1e-3);
  EXPECT_TRUE(options_.nesterov);
  EXPECT_EQ(options_.data, "/mnt/a b");
  EXPECT_EQ(options_.name, "12: x");
  EXPECT_THAT(options_.milestones, ElementsAre(1, 2));
  EXPECT_THAT(options_.tags, ElementsAre("a", "b, c"));
  EXPECT_EQ(options_.seed, 1);
  load("");
  load("---\noptimizer.lr: 2\nmilestones: []\n...\n");
  EXPECT_EQ(options_.lr, 2);
  EXPECT_THAT(options_.milestones, IsEmpty());
}

TEST_F(ConfigTest, FlagsOverrideFiles) {
  std::ofstream(path_) << "epochs: 10\nname: file\noptimizer: {nesterov: true}\n";
  const std::string file = path_.string();
  EXPECT_FALSE(parse({"--epochs=20", "--optimizer.lr", "-0.5", "--config", file.c_str(),
                      "--no-optimizer.nesterov", "--milestones", "40,80", "--tags=[x, 'y,z']",
                      "--name", "--odd"}));
  EXPECT_EQ(options_.epochs, 20);
  EXPECT_EQ(options_.lr, -0.5);
  EXPECT_FALSE(options_.nesterov);
  EXPECT_THAT(options_.milestones, ElementsAre(40, 80));
  EXPECT_THAT(options_.tags, ElementsAre("x", "y,z"));
  EXPECT_EQ(options_.name, "--odd");
  EXPECT_FALSE(parse({"--optimizer.nesterov", "--seed=255", "--tags="}));
  EXPECT_TRUE(options_.nesterov);
  EXPECT_EQ(options_.seed, 255);
  EXPECT_THAT(options_.tags, IsEmpty());
  EXPECT_FALSE(parse({"--optimizer.nesterov=false"}));
  EXPECT_FALSE(options_.nesterov);
}

TEST_F(ConfigTest, WritesWhatItReads) {
  options_.lr = 0.1 + 0.2;
  options_.name = "yes: [no]\n\"quoted\" # text";
  options_.tags = {"", "- a", "b, c", "d\r", "e\x01"};
  options_.data = "";
  config_.save(directory_.path() / "runs" / "1" / "config.yaml");
  const auto before = options_;
  options_ = {};
  config_.load(directory_.path() / "runs" / "1" / "config.yaml");
  EXPECT_EQ(options_.lr, before.lr);
  EXPECT_EQ(options_.name, before.name);
  EXPECT_EQ(options_.tags, before.tags);
  EXPECT_EQ(options_.data, before.data);
  EXPECT_EQ(options_.milestones, before.milestones);
  for (const double value : {std::numeric_limits<double>::infinity(), -1e300, 5e-324}) {
    options_.lr = value;
    load(config_.to_yaml());
    EXPECT_EQ(options_.lr, value);
  }
  for (const auto& text : {std::string("a\0b", 3), std::string("p\xff")}) {
    options_.name = text;
    EXPECT_THAT([&] { std::ignore = config_.to_yaml(); },
                ThrowsMessage<UsageError>(HasSubstr("name cannot be saved")));
  }
}

TEST(Config, TakesFlagsWithDashesForUnderscores) {
  int batch_size = 1;
  bool use_cache = true;
  int exact = 1;
  int similar = 1;
  Config config;
  config.add("batch_size", batch_size);
  config.add("optimizer.use_cache", use_cache);
  config.add("x_y", similar);
  config.add("x-y", exact);
  const char* const arguments[] = {"train", "--batch-size=2", "--no-optimizer.use-cache", "--x-y",
                                   "3"};
  EXPECT_FALSE(config.parse(5, arguments));
  EXPECT_EQ(batch_size, 2);
  EXPECT_FALSE(use_cache);
  EXPECT_EQ(exact, 3);
  EXPECT_EQ(similar, 1);
  const char* const help[] = {"train", "-h"};
  EXPECT_THAT(config.parse(2, help).value(), HasSubstr("--batch_size"));
}

TEST_F(ConfigTest, PrintsItselfAndItsHelp) {
  EXPECT_EQ(parse({"--print-config", "--epochs", "7"}),
            "epochs: 7\n"
            "seed: 1\n"
            "optimizer:\n"
            "  lr: 0.1\n"
            "  nesterov: false\n"
            "data: /data\n"
            "name: run\n"
            "milestones: [30, 60]\n"
            "tags: []\n");
  EXPECT_THAT(*parse({"--help"}),
              AllOf(StartsWith("Trains a net.\n\n  --config FILE\n"),
                    HasSubstr("  --epochs\n      how often the data are seen; an integer "
                              "(default: 7)\n"),
                    HasSubstr("each of which is an integer (default: 30,60)\n")));
}

TEST_F(ConfigTest, WithoutOptionsSaysSo) {
  Config none("Has none.");
  const std::vector<const char*> arguments{"program", "--epochs=1"};
  EXPECT_THAT([&] { static_cast<void>(none.parse(2, arguments.data())); },
              ThrowsMessage<UsageError>(HasSubstr("unknown option 'epochs'; there are none")));
}

TEST_F(ConfigTest, NamesWhatIsWrongAndWhere) {
  expect_refused("epochs: 1\n\noptimizer:\n  lrr: 1\n",
                 ":4: unknown option 'optimizer.lrr'; did you mean 'optimizer.lr'?");
  expect_refused("something else: 1\n", ":1: unknown option 'something else'; there are epochs,");
  expect_refused("epochs: ten\n", ":1: epochs is 'ten'; it must be an integer");
  expect_refused("epochs: 1.5\n", "it must be an integer");
  expect_refused("epochs: 99999999999\n", "it must be an integer, in the range of its type");
  expect_refused("epochs: [1]\n", ":1: epochs must be an integer");
  expect_refused("epochs:\n", ":1: epochs has no value");
  expect_refused("epochs: {}\n", ":1: epochs has no value");
  expect_refused("unknown: {}\n", ":1: unknown has no value");
  expect_refused("seed: -1\n", "it must be an integer that is not negative");
  expect_refused("seed: 256\n", "an integer that is not negative, in the range of its type");
  expect_refused("optimizer: {lr: 1x, nesterov: true}\n",
                 "optimizer.lr is '1x'; it must be a number");
  expect_refused("optimizer:\n  nesterov: yes\n",
                 ":2: optimizer.nesterov is 'yes'; it must be true");
  expect_refused("milestones: 5\n", "milestones must be a list, each of which is an integer");
  expect_refused("milestones: [1, b]\n", "milestones is '1, b'; it must be a list");
  expect_refused("milestones: [[1]]\n", "has a value that is no text or number");
  expect_refused("epochs: 1\nname: a\nepochs: 2\n", ":3: epochs is set twice");
  expect_refused("optimizer: {lr: 1}\noptimizer.lr: 2\n", ":2: optimizer.lr is set twice");
  expect_refused("[1, 2]\n", "has no map of names to values");
  expect_refused("epochs: 1\nname: [a\n", "is no YAML");
  expect_refused("optimizer:\n\tlr: 1\n", ":2: is no YAML");
  expect_refused("optimizer:\n\tlr: 1\n", "; the line is indented with a tab: use spaces");
  expect_refused("optimizer:\n  lr: 1\n \t nesterov: true\n", "indented with a tab");
  expect_refused("epochs: 1\n---\nname: a\n", ":2: begins a second document");
  expect_refused("epochs: 1\n---\n", ":2: begins a second document");
  expect_refused("name: \xff\n", "is not UTF-8 text");
  expect_refused(std::string("name: \0N\n", 9), "is not UTF-8 text");
  expect_refused("epochs: 1\nname: \"\\N\"\n", ":2: name is not UTF-8: write the character itself");
  expect_refused("? [a]\n: 1\n", "a key must be a text");
  expect_refused("optimizer: &a\n  more: *a\n", ":2: more than 30 levels");
  const std::string directory = directory_.path().string();
  EXPECT_THAT(
      [&] { config_.load(directory_.path() / "none"); },
      ThrowsMessage<Error>("cannot read " + directory + "/none: No such file or directory"));
  EXPECT_THAT([&] { config_.load(directory); },
              ThrowsMessage<Error>("cannot read " + directory + ": it is a directory"));

  expect_flags_refused({"--epoch=1"}, "--epoch: unknown option 'epoch'; did you mean 'epochs'?");
  expect_flags_refused({"--epochs=x"}, "--epochs: epochs is 'x'; it must be an integer");
  expect_flags_refused({"--milestones=1,99999999999999999999"},
                       "an integer, in the range of its type");
  EXPECT_THAT([&] { static_cast<void>(parse({"--optimizer.nesterov=1"})); },
              ThrowsMessage<UsageError>(Not(HasSubstr("range"))));
  expect_flags_refused({"--epochs"}, "--epochs: a value must follow");
  expect_flags_refused({"--config"}, "--config: a value must follow");
  expect_flags_refused({"--no-epochs"}, "unknown option 'no-epochs'");
  for (const char* const flag : {"--help=3", "--print-config=3", "--no-optimizer.nesterov=3"}) {
    expect_flags_refused({flag}, ": it takes no value, and got '3'");
  }
  expect_flags_refused({"--optimizer.nesterov=1"}, "it must be true or false");
  expect_flags_refused({"--milestones=1,,2"}, "each of which is an integer");
  for (const char* const flag : {"--optimizer.lr=+-3", "--optimizer.lr=nan(a)"}) {
    expect_flags_refused({flag}, "it must be a number");
  }
  expect_flags_refused({"--tags=[a"}, "--tags");
  expect_flags_refused({"--tags=[a]: b"}, "is no list of texts");
  expect_flags_refused({"train.yaml"}, "unexpected argument 'train.yaml'");
  expect_flags_refused({"--"}, "unexpected argument");
  expect_flags_refused({"--optimizer.nesterov", "true"},
                       "takes a value only after '=' (--name=true)");
}

TEST_F(ConfigTest, NamesAFileThatCannotBeRead) {
  const auto loop = directory_.path() / "loop";
  std::filesystem::create_symlink(loop, loop);
  for (const auto& path : {loop, directory_.path() / std::string(300, 'x'), directory_.path()}) {
    EXPECT_THAT([&] { config_.load(path); },
                ThrowsMessage<Error>(HasSubstr("cannot read " + path.string())));
  }
}

TEST(Config, TakesNumbersOfItsTypeOnly) {
  float scale = 1;
  Config config;
  config.add("scale", scale);
  const auto parse = [&](const std::string& flag) {
    const char* const arguments[]{"train", flag.c_str()};
    static_cast<void>(config.parse(2, arguments));
  };
  EXPECT_THAT([&] { parse("--scale=1e39"); },
              ThrowsMessage<UsageError>(HasSubstr("scale is '1e39'; it must be a number")));
  EXPECT_EQ(scale, 1);
  parse("--scale=-.Inf");
  EXPECT_EQ(scale, -std::numeric_limits<float>::infinity());
  parse("--scale=.nan");
  EXPECT_TRUE(std::isnan(scale));
  parse("--scale=+3");
  EXPECT_EQ(scale, 3);
}

TEST_F(ConfigTest, RefusesNamesThatCannotBeTold) {
  int more = 0;
  for (const char* const name :
       {"", "epochs", "optimizer", "epochs.more", "help", "config", "print-config"}) {
    EXPECT_THROW(config_.add(name, more), UsageError) << name;
  }
}

}  // namespace
}  // namespace paceline
