#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launch/console.h"
#include "launch/line_splitter.h"
#include "launch/tail_buffer.h"

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

struct Screen {
  std::string out;
  std::string err;
  Console console;
  Screen(bool out_terminal, bool err_terminal, int columns = 40)
      : console({[this](std::string_view text) { out += text; }, out_terminal},
                {[this](std::string_view text) { err += text; }, err_terminal}, 2,
                [columns] { return columns; }) {}
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
