#include <paceline/logger.h>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <paceline/error.h>

#include "base/log.h"
#include "base/pipe.h"
#include "base/unique_fd.h"
#include "support/temporary_directory.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

using testing::ElementsAre;
using testing::MatchesRegex;

constexpr const char* kLine = "[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}[.][0-9]{3} .*";

struct Closes {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, Closes>;

// Without its time.
std::vector<std::string> messages_in(const std::filesystem::path& path) {
  std::vector<std::string> lines;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    EXPECT_THAT(line, MatchesRegex(kLine));
    lines.push_back(line.substr(std::string_view("2026-11-26 18:02:57.123 ").size()));
  }
  return lines;
}

TEST(Logger, WritesWhatEachRankIsToSay) {
  const test::TemporaryDirectory directory;
  test::expect_torch_ranks(2, "paceline", [&](int rank, int) {
    const auto path = directory.path() / std::to_string(rank);
    const File file(std::fopen(path.c_str(), "w"));
    const Logger log({.output = file.get()});
    log.debug("to find errors");
    log.info("epoch 3 begins");
    log.warning("the sensor is noisy");
    log.error("the disk is full");
    const Logger all(
        {.level = LogLevel::debug, .other_ranks_level = LogLevel::debug, .output = file.get()});
    all.debug("to find errors");
    if (rank == 0) {
      EXPECT_THAT(messages_in(path),
                  ElementsAre("rank 0 info: epoch 3 begins", "rank 0 warning: the sensor is noisy",
                              "rank 0 error: the disk is full", "rank 0 debug: to find errors"));
    } else {
      EXPECT_THAT(messages_in(path),
                  ElementsAre("rank 1 warning: the sensor is noisy",
                              "rank 1 error: the disk is full", "rank 1 debug: to find errors"));
    }
  });
}

TEST(Logger, MayReceiveTheLibrarysMessages) {
  const test::TemporaryDirectory directory;
  const auto path = directory.path() / "log";
  const File file(std::fopen(path.c_str(), "w"));
  set_log_callback(Logger({.output = file.get()}));
  base::log(LogLevel::warning, "ranks {} and {} have waited", 0, 2);
  set_log_callback({});
  EXPECT_THAT(messages_in(path), ElementsAre("rank 0 warning: ranks 0 and 2 have waited"));
}

TEST(Logger, DropsWhatNobodyReads) {
  base::Pipe pipe = base::make_pipe();
  const File file(::fdopen(pipe.write_end.release(), "w"));
  const Logger log({.output = file.get()});
  const auto size = ::fcntl(pipe.read_end.get(), F_GETPIPE_SZ);
  for (int written = 0; written <= size; written += 1000) log.info(std::string(1000, 'x'));
}

TEST(Logger, DoesNotMixTheLinesOfThreads) {
  const test::TemporaryDirectory directory;
  const auto path = directory.path() / "log";
  {
    const File file(std::fopen(path.c_str(), "w"));
    const Logger log({.output = file.get()});
    std::vector<std::jthread> threads;
    for (const char letter : {'a', 'b', 'c'}) {
      threads.emplace_back([&log, letter] {
        for (int i = 0; i < 100; ++i) log.info(std::string(500, letter));
      });
    }
  }
  const auto lines = messages_in(path);
  EXPECT_EQ(lines.size(), 300u);
  for (const std::string& line : lines) {
    EXPECT_EQ(line, "rank 0 info: " + std::string(500, line.back()));
  }
}

TEST(Logger, DoesNotEndAProcessWhoseReaderIsGone) {
  base::Pipe pipe = base::make_pipe();
  const File file(::fdopen(pipe.write_end.release(), "w"));
  const Logger log({.output = file.get()});
  log.info("read by nobody");
  pipe.read_end.reset();
  log.info("read by nobody");
}

TEST(Logger, DoesNotWaitForATerminalThatNobodyReads) {
  int master = -1;
  int slave = -1;
  if (::openpty(&master, &slave, nullptr, nullptr, nullptr) != 0) GTEST_SKIP() << "no terminals";
  const base::UniqueFd owned(master);
  const File file(::fdopen(slave, "w"));
  const Logger log({.output = file.get()});
  for (int i = 0; i < 100; ++i) log.info(std::string(3000, 'x'));
}

TEST(Logger, RejectsAnOutputWithoutADescriptor) {
  EXPECT_THROW(Logger({.output = nullptr}), UsageError);
  char* text = nullptr;
  std::size_t size = 0;
  File memory(::open_memstream(&text, &size));
  EXPECT_THROW(Logger({.output = memory.get()}), UsageError);
  memory.reset();
  std::free(text);  // NOLINT(cppcoreguidelines-no-malloc): open_memstream's
}

}  // namespace
}  // namespace paceline
