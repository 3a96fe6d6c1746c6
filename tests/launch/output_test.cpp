#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <paceline/error.h>

#include "base/pipe.h"
#include "launch/console.h"
#include "launch/filtered_log.h"
#include "launch/line_splitter.h"
#include "launch/non_blocking_writer.h"
#include "launch/tail_buffer.h"
#include "support/temporary_directory.h"

namespace paceline::launch {
namespace {

using ::testing::ElementsAre;
using ::testing::SizeIs;

std::vector<std::string> split(LineSplitter& splitter, std::string_view bytes) {
  std::vector<std::string> lines;
  splitter.feed(bytes, [&](std::string_view line, char end) {
    lines.push_back(std::string(line) + (end == '\n' ? "\\n" : "\\r"));
  });
  return lines;
}

TEST(LineSplitter, IsIndependentOfChunkSizes) {
  const std::string text = "a\nbc\r\n\nde\rf";
  for (std::size_t size = 1; size <= text.size(); ++size) {
    LineSplitter splitter;
    std::vector<std::string> lines;
    for (std::size_t at = 0; at < text.size(); at += size) {
      const auto more = split(splitter, std::string_view(text).substr(at, size));
      lines.insert(lines.end(), more.begin(), more.end());
    }
    EXPECT_THAT(lines, ElementsAre("a\\n", "bc\\n", "\\n", "de\\r")) << size;
    EXPECT_EQ(splitter.pending(), "f");
  }
}

TEST(LineSplitter, CutsEndlessLines) {
  constexpr std::size_t most = LineSplitter::kMaxLine;
  LineSplitter splitter;
  std::vector<std::size_t> sizes;
  const auto note = [&](std::string_view line, char) { sizes.push_back(line.size()); };
  splitter.feed(std::string(2 * most + 5, 'x'), note);
  EXPECT_THAT(sizes, ElementsAre(most, most));
  EXPECT_THAT(splitter.pending(), SizeIs(5));
  splitter.feed(std::string(most - 6, 'x') + "\n", note);
  EXPECT_THAT(sizes, ElementsAre(most, most, most - 1));
  for (const char* end : {"\n", "\r\n"}) {
    sizes.clear();
    splitter.feed(std::string(most, 'x') + end, note);
    EXPECT_THAT(sizes, ElementsAre(most)) << "one that fits is one line";
  }
}

TEST(TailBuffer, KeepsTheLastLinesAsATerminalShowsThem) {
  TailBuffer lines;
  for (int i = 0; i < 30; ++i) lines.feed(Stream::out, "line " + std::to_string(i) + "\n");
  lines.feed(Stream::err, "\r10%\r20%\r100%\r\n");
  lines.feed(Stream::out, "unfinished");
  const auto last = lines.lines();
  ASSERT_THAT(last, SizeIs(TailBuffer::kMaxLines));
  EXPECT_EQ(last.front(), "line 12");
  EXPECT_EQ(last[18], "100%");
  EXPECT_EQ(last[19], "unfinished");
  lines.feed(Stream::out, std::string(1000, 'x') + "\n");
  EXPECT_EQ(lines.lines().back(), "unfinished" + std::string(490, 'x') + "...");
  lines.feed(Stream::out, std::string(499, 'x') + "\u00e9\n");
  EXPECT_EQ(lines.lines().back(), std::string(499, 'x') + "...") << "cut between characters";
}

TEST(FilteredLog, HasTheWholeLinesThatContainAText) {
  const test::TemporaryDirectory directory;
  const auto path = directory.path() / "attempt_0" / "filtered.log";
  const auto content = [&] {
    std::ifstream file(path);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  FilteredLog log(path, {"apple", "a,b"}, {"0: ", "1: "});
  log.write(0, "an app");
  log.write(1, "a pear\nan apple\n");
  EXPECT_EQ(content(), "1: an apple\n");
  log.write(0, "le\r\nunrelated\nno newline a,b");
  EXPECT_EQ(content(), "1: an apple\n0: an apple\n");
  log.finish();
  EXPECT_EQ(content(), "1: an apple\n0: an apple\n0: no newline a,b\n");
}

TEST(FilteredLog, SaysThatItCouldNotBeWritten) {
  FilteredLog full("/dev/full", {"x"}, {""});
  full.write(0, "no match\n");
  EXPECT_NO_THROW(full.finish());
  full.write(0, "x\n");
  EXPECT_THROW(full.finish(), Error);
  EXPECT_THROW(FilteredLog("/proc/none/log", {"x"}, {""}), Error);
}

// As fast as the reader takes it: what is left is not moved for each part that is written.
TEST(NonBlockingWriter, PassesOnALargeBacklog) {
  auto [reader, writer] = base::make_pipe();
  std::string text;
  for (int line = 0; text.size() < (std::size_t{128} << 20); ++line) {
    text += std::to_string(line) + "\n";
  }
  std::string received;
  std::thread reading([&, fd = reader.get()] {
    std::vector<char> buffer(std::size_t{1} << 16);
    for (ssize_t size = 0; (size = ::read(fd, buffer.data(), buffer.size())) > 0;) {
      received.append(buffer.data(), static_cast<std::size_t>(size));
    }
  });
  const auto begin = std::chrono::steady_clock::now();
  NonBlockingWriter out(writer.get(), "a pipe");
  out.write(text);
  out.write("end");
  out.finish({});
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
  writer.reset();
  reading.join();
  EXPECT_TRUE(received == text + "end");
}

struct Screen {
  std::string out;
  std::string err;
  Console console;
  explicit Screen(bool out_terminal, bool err_terminal, int columns = 40,
                  std::vector<std::string> prefixes = {"[rank0]: ", "[rank1]: "},
                  std::optional<int> bar_rank = 0)
      : console({[this](std::string_view text) { out += text; }, out_terminal},
                {[this](std::string_view text) { err += text; }, err_terminal}, std::move(prefixes),
                bar_rank, [columns] { return columns; }) {}
};

TEST(Console, PrefixesWholeLinesIntoFiles) {
  Screen screen(false, false);
  screen.console.write(0, Stream::out, "hel");
  screen.console.write(1, Stream::out, "other\nsecond ");
  screen.console.write(0, Stream::out, "lo\n");
  screen.console.write(1, Stream::err, "10%\r20%\r");
  EXPECT_EQ(screen.out, "[rank1]: other\n[rank0]: hello\n");
  screen.console.finish();
  EXPECT_EQ(screen.out, "[rank1]: other\n[rank0]: hello\n[rank1]: second \n");
  EXPECT_EQ(screen.err, "[rank1]: 10%\r[rank1]: 20%\n");
}

TEST(Console, DrawsRankZerosBarOnATerminal) {
  Screen screen(true, true);
  screen.console.write(0, Stream::err, "\r10%");
  EXPECT_EQ(screen.err, "[rank0]: 10%");
  screen.err.clear();
  screen.console.write(0, Stream::err, "\r20%");
  EXPECT_EQ(screen.err, "\r\x1b[K[rank0]: 20%");
  screen.err.clear();
  screen.console.write(1, Stream::out, "hello\n");  // goes above the bar
  EXPECT_EQ(screen.out, "\r\x1b[K[rank1]: hello\n[rank0]: 20%");
  screen.out.clear();
  screen.console.write(0, Stream::err, "\r100%\n");
  EXPECT_EQ(screen.err, "\r\x1b[K[rank0]: 100%\n");
}

TEST(Console, PrefixesABarWithALeadingReturnOnceInAFile) {
  Screen screen(false, false);
  screen.console.write(0, Stream::err, "\r10%");
  screen.console.write(0, Stream::err, "\r20%\r\n");
  screen.console.write(0, Stream::err, "\n");
  EXPECT_EQ(screen.err, "[rank0]: 10%\r[rank0]: 20%\n[rank0]: \n");
}

TEST(Console, KeepsTheBarBelowRankZerosOtherLines) {
  Screen screen(true, true);
  screen.console.write(0, Stream::err, "\r10%");
  screen.console.write(0, Stream::out, "hello\n");
  EXPECT_EQ(screen.out, "\r\x1b[K[rank0]: hello\n[rank0]: 10%");
  screen.out.clear();
  screen.console.write(0, Stream::out, "hel");  // an unfinished line takes the bar's place
  EXPECT_EQ(screen.out, "\r\x1b[K[rank0]: hel");
  screen.out.clear();
  screen.console.write(0, Stream::out, "lo\n");
  EXPECT_EQ(screen.out, "\r\x1b[K[rank0]: hello\n[rank0]: 10%");
  screen.out.clear();
  screen.err.clear();
  screen.console.write(0, Stream::err, "\r100%\n");
  EXPECT_EQ(screen.err, "\r\x1b[K[rank0]: 100%\n");
}

TEST(Console, BarsOfOtherRanksShowTheirLastStateOnly) {
  Screen screen(true, true);
  screen.console.write(1, Stream::err, "\r10%\r20%");
  EXPECT_EQ(screen.err, "");
  screen.console.write(1, Stream::err, "\r30%\r\n");
  EXPECT_EQ(screen.err, "[rank1]: 30%\n");
}

TEST(Console, CutsABarThatWouldWrap) {
  Screen screen(true, true, 20);
  screen.console.write(0, Stream::out, "0123456789ab");
  EXPECT_EQ(screen.out, "[rank0]: 0123456789a");
  screen.console.finish();
  EXPECT_EQ(screen.out, "[rank0]: 0123456789a\r\x1b[K[rank0]: 0123456789ab\n");
}

// As on a node that is not the first: none of its ranks is global rank 0.
TEST(Console, DrawsTheBarOfTheGivenRankOnly) {
  Screen other(true, true, 40, {"[rank2]: ", "[rank3]: "}, std::nullopt);
  other.console.write(0, Stream::err, "\r10%\r20%");
  EXPECT_EQ(other.err, "");
  other.console.write(1, Stream::err, "hello\n");
  other.console.finish();
  EXPECT_EQ(other.err, "[rank3]: hello\n[rank2]: 20%\n");
  Screen second(true, true, 40, {"[rank1]: ", "[rank0]: "}, 1);
  second.console.write(0, Stream::err, "\r10%");
  second.console.write(1, Stream::err, "\r20%");
  EXPECT_EQ(second.err, "[rank0]: 20%");
}

TEST(Console, PrefixesEachStateOfABarOnceInAFile) {
  const std::string text = "\r10%\r\r20%\r\n\rdone\n";
  for (std::size_t size = 1; size <= text.size(); ++size) {
    Screen screen(false, false);
    for (std::size_t at = 0; at < text.size(); at += size) {
      screen.console.write(1, Stream::out, std::string_view(text).substr(at, size));
      screen.console.write(0, Stream::out, "x\n");
    }
    std::string own;
    for (std::size_t at = 0; at < screen.out.size();) {
      const std::size_t end = screen.out.find_first_of("\r\n", at) + 1;
      if (screen.out.substr(at, end - at) != "[rank0]: x\n") own += screen.out.substr(at, end - at);
      at = end;
    }
    EXPECT_EQ(own, "[rank1]: 10%\r[rank1]: 20%\n[rank1]: done\n") << size;
  }
}

TEST(Console, TheBarSurvivesTheLinesOfAllRanks) {
  Screen screen(true, true);
  screen.console.write(0, Stream::err, "\r10%");
  screen.console.write(1, Stream::err, "one\r\ntwo\nthr");
  screen.console.write(1, Stream::err, "ee\n");
  screen.console.write(0, Stream::out, "\rfour\r\n");
  EXPECT_EQ(screen.err + screen.out,
            "[rank0]: 10%"
            "\r\x1b[K[rank1]: one\n[rank1]: two\n[rank0]: 10%"
            "\r\x1b[K[rank1]: three\n[rank0]: 10%"
            "\r\x1b[K[rank0]: four\n[rank0]: 10%");
}

TEST(Console, CountsThePrefixesColumnsNotItsBytes) {
  Screen screen(true, true, 8, {"\x1b[32m\u00e9>\x1b[0m "});
  screen.console.write(0, Stream::out, "0123456789");
  EXPECT_EQ(screen.out, "\x1b[32m\u00e9>\x1b[0m 01234");
  EXPECT_EQ(Console::columns_beside("[rank0]: ", 40), 31);
  EXPECT_EQ(Console::columns_beside("[rank0]: ", 5), 1);
}

TEST(Console, FinishEndsTheBarOnce) {
  Screen screen(true, true);
  screen.console.write(0, Stream::err, "\r50%");
  screen.console.finish();
  EXPECT_EQ(screen.out + screen.err.substr(screen.err.find('%') + 1), "\r\x1b[K[rank0]: 50%\n");
}

TEST(Fit, IgnoresEscapesAndContinuationBytes) {
  EXPECT_EQ(fit("abc", 3), "abc");
  EXPECT_EQ(fit("abcd", 3), "abc");
  EXPECT_EQ(fit("\x1b[1;32mabcd\x1b[0m", 3), "\x1b[1;32mabc\x1b[0m");
  EXPECT_EQ(fit("\xE2\x96\x88\xE2\x96\x88\xE2\x96\x88", 2), "\xE2\x96\x88\xE2\x96\x88");
  EXPECT_EQ(fit("\x1b[", 1), "\x1b[");
  EXPECT_EQ(fit("\x1b", 0), "\x1b");
}

}  // namespace
}  // namespace paceline::launch
