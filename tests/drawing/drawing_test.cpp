#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <regex>
#include <sstream>
#include <string>
#include <system_error>
#include <vector>

#include "drawing/canvas.h"
#include "drawing/line_chart.h"
#include "drawing/save_svg.h"
#include "drawing/scale.h"
#include "drawing/span_chart.h"
#include "drawing/svg.h"
#include "drawing/text.h"
#include "support/temporary_directory.h"

namespace paceline::drawing {
namespace {

using testing::DoubleNear;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using testing::Pointwise;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST(Text, ReplacesWhatAnSvgMustNotHave) {
  EXPECT_EQ(escaped(R"(<a href="&">)"), "&lt;a href=&quot;&amp;&quot;&gt;");
  EXPECT_EQ(escaped("caf\u00e9 \u2014 \U0001F600"), "caf\u00e9 \u2014 \U0001F600");
  // Control characters, a byte alone, an overlong '/', a surrogate, and half a character.
  EXPECT_EQ(escaped("\n\x01|\xff|\xc0\xaf|\xed\xa0\x80|\xe2\x82"),
            "\uFFFD\uFFFD|\uFFFD|\uFFFD\uFFFD|\uFFFD\uFFFD\uFFFD|\uFFFD\uFFFD");
}

TEST(Text, IsCutByCharacters) {
  EXPECT_EQ(columns_of("caf\u00e9"), 4);
  EXPECT_EQ(cut_to("caf\u00e9", 4), "caf\u00e9");
  EXPECT_EQ(cut_to("\u00e9\u00e9\u00e9", 2), "\u00e9~");
  EXPECT_EQ(cut_to("abc", 0), "");
  EXPECT_EQ(cut_to("abc", -1), "");
  EXPECT_THAT(words_of("  two  words "), ElementsAre("two", "words"));
}

std::vector<double> ticks(std::vector<double> values, Scale::Ends ends, int most,
                          Scale::Kind kind = Scale::Kind::linear) {
  return Scale(values, kind, ends, most).ticks();
}

TEST(Scale, HasRoundTicks) {
  const auto near = [](const std::vector<double>& expected) {
    return Pointwise(DoubleNear(1e-9), expected);
  };
  EXPECT_THAT(ticks({2, 8}, Scale::Ends::exact, 9), near({2, 3, 4, 5, 6, 7, 8}));
  EXPECT_THAT(ticks({2, 8}, Scale::Ends::round, 5), near({0, 2, 4, 6, 8}));
  EXPECT_THAT(ticks({1001, 1007}, Scale::Ends::round, 5), near({1000, 1002, 1004, 1006, 1008}));
  EXPECT_THAT(ticks({-3, 4}, Scale::Ends::round, 5), near({-4, -2, 0, 2, 4}));
  EXPECT_THAT(ticks({0.0123, 0.0871}, Scale::Ends::round, 6),
              near({0, 0.02, 0.04, 0.06, 0.08, 0.1}));
  EXPECT_THAT(ticks({0.02, 7}, Scale::Ends::round, 7, Scale::Kind::logarithmic),
              near({0.01, 0.1, 1, 10}));
  EXPECT_THAT(ticks({2, 30}, Scale::Ends::round, 9, Scale::Kind::logarithmic),
              near({1, 2, 5, 10, 20, 50, 100}));
  EXPECT_THAT(ticks({1e-8, 1e8}, Scale::Ends::round, 5, Scale::Kind::logarithmic),
              near({1e-8, 1e-4, 1, 1e4, 1e8}));
}

TEST(Scale, LeavesOutWhatItCannotShow) {
  const Scale linear(std::vector{kNan, 1.0, kInfinity, 3.0, -kInfinity}, Scale::Kind::linear,
                     Scale::Ends::exact, 5);
  EXPECT_DOUBLE_EQ(linear.position(1), 0);
  EXPECT_DOUBLE_EQ(linear.position(2.5), 0.75);
  EXPECT_FALSE(linear.shows(kNan));
  EXPECT_TRUE(linear.shows(-1e200));
  const Scale logarithmic(std::vector{0.0, -2.0, 1.0, 100.0}, Scale::Kind::logarithmic,
                          Scale::Ends::exact, 5);
  EXPECT_DOUBLE_EQ(logarithmic.position(10), 0.5);
  EXPECT_FALSE(logarithmic.shows(0));
}

TEST(Scale, TakesValuesWithoutARange) {
  for (const auto kind : {Scale::Kind::linear, Scale::Kind::logarithmic}) {
    for (const auto ends : {Scale::Ends::exact, Scale::Ends::round}) {
      for (const std::vector<double>& values : {std::vector<double>{},
                                                {0},
                                                {5},
                                                {5, 5},
                                                {-5},
                                                {1e300, -1e300},
                                                {1e-300, 1e300},
                                                {1e15, 1e15 + 1}}) {
        const Scale scale(values, kind, ends, 2);
        EXPECT_LE(scale.ticks().size(), 8u);
        for (const double value : values) {
          if (!scale.shows(value)) continue;
          EXPECT_GE(scale.position(value), 0);
          EXPECT_LE(scale.position(value), 1);
        }
      }
    }
  }
}

TEST(Scale, FormatsTicks) {
  EXPECT_EQ(tick_text(0), "0");
  EXPECT_EQ(tick_text(0.30000000000000004), "0.3");
  EXPECT_EQ(tick_text(12000), "12000");
  EXPECT_EQ(tick_text(1e-5), "1e-05");
}

TEST(Canvas, WrapsItemsAndCutsLongOnes) {
  Canvas canvas(10);
  canvas.put(0, 8, "abc");
  canvas.put(-1, 0, "no");
  canvas.append({"one", "two", "three", "seventeen letters"}, 2);
  EXPECT_EQ(canvas.str(), "        ab\none  two\nthree\nseventeen~\n");
  EXPECT_EQ(canvas.rows(), 4);
}

// The values of an attribute, in order.
std::vector<std::string> attributes(const std::string& svg, const std::string& pattern) {
  const std::regex regex(pattern);
  std::vector<std::string> found;
  for (auto it = std::sregex_iterator(svg.begin(), svg.end(), regex); it != std::sregex_iterator();
       ++it) {
    found.push_back((*it)[1]);
  }
  return found;
}

// Every element that is opened is closed, in order, and nothing needs another file.
void expect_one_file(const std::string& svg) {
  std::vector<std::string> open;
  const std::regex tag(R"(<(/?)([a-z]+)[^>]*?(/?)>)");
  for (auto it = std::sregex_iterator(svg.begin(), svg.end(), tag); it != std::sregex_iterator();
       ++it) {
    if ((*it)[1] == "/") {
      ASSERT_FALSE(open.empty());
      EXPECT_EQ(open.back(), (*it)[2]);
      open.pop_back();
    } else if ((*it)[3] != "/") {
      open.push_back((*it)[2]);
    }
  }
  EXPECT_TRUE(open.empty());
  EXPECT_THAT(svg, Not(HasSubstr("<script")));
  EXPECT_THAT(svg, Not(HasSubstr("href")));
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
  EXPECT_THAT(svg, Not(HasSubstr("inf")));
}

// Each text of the drawing is inside of it, by the upper bound for its width.
void expect_texts_inside(const std::string& svg) {
  const double width = std::stod(attributes(svg, R"re(<svg[^>]* width="(\d+)")re").at(0));
  const double height = std::stod(attributes(svg, R"re(<svg[^>]* height="(\d+)")re").at(0));
  const std::regex text(
      R"re(<text class="\w+" x="([\d.]+)" y="([\d.]+)"( text-anchor="(\w+)")?[^>]*>([^<]*)</text>)re");
  int texts = 0;
  for (auto it = std::sregex_iterator(svg.begin(), svg.end(), text); it != std::sregex_iterator();
       ++it, ++texts) {
    const std::string all = (*it)[0];
    if (all.find("rotate") != all.npos) continue;
    const double bound = text_width((*it)[5].str()) * (all.find("weight") != all.npos ? 1.25 : 1);
    const double x = std::stod((*it)[1]);
    const double left = (*it)[4] == "middle" ? x - bound / 2 : (*it)[4] == "end" ? x - bound : x;
    EXPECT_GE(left, 0) << all;
    EXPECT_LE(left + bound, width) << all;
    EXPECT_LE(std::stod((*it)[2]) + 4, height) << all;
  }
  EXPECT_GT(texts, 0);
}

void expect_lines_within(const std::string& text, int columns) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    EXPECT_LE(columns_of(line), columns) << line;
    EXPECT_TRUE(line.empty() || line.back() != ' ') << '[' << line << ']';
  }
}

LineChart two_lines() {
  return {"Times <of> two",
          {"ranks"},
          {"ms"},
          {{"measured", {{2, 10}, {4, 20}, {6, 30}}, false}, {"theory", {{2, 9}, {6, 27}}, true}}};
}

TEST(LineChart, PutsPointsWhereTheAxesSay) {
  const std::string svg = two_lines().to_svg();
  expect_one_file(svg);
  expect_texts_inside(svg);
  EXPECT_THAT(svg, HasSubstr("<title>Times &lt;of&gt; two</title>"));
  EXPECT_THAT(svg, HasSubstr("<title>measured: 4, 20</title>"));
  const auto points = attributes(svg, R"re(polyline points="([^"]*)")re");
  ASSERT_EQ(points.size(), 4u);  // two in the legend
  std::istringstream stream(std::regex_replace(points[2], std::regex(","), " "));
  double x2 = 0, y10 = 0, x4 = 0, y20 = 0, x6 = 0, y30 = 0;
  stream >> x2 >> y10 >> x4 >> y20 >> x6 >> y30;
  EXPECT_NEAR(x4 - x2, x6 - x4, 0.02);
  EXPECT_NEAR(y10 - y20, y20 - y30, 0.02);
  EXPECT_LT(x2, x6);
  EXPECT_LT(y30, y10);  // upwards
  EXPECT_EQ(attributes(svg, R"re((stroke-dasharray))re").size(), 2u);
}

TEST(LineChart, PutsPointsIntoATerminal) {
  const std::string text = two_lines().to_terminal(60);
  expect_lines_within(text, 60);
  std::istringstream lines(text);
  std::vector<std::string> all;
  for (std::string line; std::getline(lines, line);) all.push_back(line);
  EXPECT_EQ(all[0], "Times <of> two");
  EXPECT_EQ(all[1], "ms");
  // 30 is the highest tick.
  EXPECT_THAT(all[2], testing::MatchesRegex("30 [+] +\\.*o"));
  EXPECT_THAT(text, HasSubstr("o measured   x theory"));
  EXPECT_THAT(text, testing::ContainsRegex("\n +2 +[23] +.*6\n +ranks\n"));
}

TEST(LineChart, TakesLogarithmicAxes) {
  LineChart chart{"",
                  {"step"},
                  {"loss", Scale::Kind::logarithmic},
                  {{"loss", {{0, 100}, {1, 10}, {2, 1}, {3, 0}, {4, kNan}}, false}}};
  const auto points = attributes(chart.to_svg(), R"re(polyline points="([^"]*)")re");
  std::istringstream stream(std::regex_replace(points.at(1), std::regex(","), " "));
  std::vector<double> numbers;
  for (double number = 0; stream >> number;) numbers.push_back(number);
  ASSERT_EQ(numbers.size(), 6u);
  EXPECT_NEAR(numbers[3] - numbers[1], numbers[5] - numbers[3], 0.02);
  expect_one_file(chart.to_svg());
}

TEST(LineChart, TakesAnything) {
  std::vector<Line> many;
  for (int i = 0; i < 30; ++i) {
    many.push_back({std::string(static_cast<std::size_t>(10 * i), 'M'), {}, i % 2 == 1});
    for (int j = 0; j < 500; ++j) many.back().points.push_back({std::pow(-1.5, j), kInfinity / i});
  }
  for (const LineChart& chart : {LineChart{}, LineChart{"", {}, {}, {{"none", {}, false}}},
                                 LineChart{"x", {"x"}, {"y"}, {{"one", {{7, -3}}, false}}},
                                 LineChart{std::string(500, 'W') + "<&",
                                           {std::string(500, 'x')},
                                           {std::string(500, 'y')},
                                           many}}) {
    expect_one_file(chart.to_svg());
    for (const int columns : {-1, 40, 200}) {
      expect_lines_within(chart.to_terminal(columns), std::max(columns, 40));
    }
  }
}

SpanChart pipeline() {
  return {"Two stages",
          "time",
          {"forward", "backward"},
          {{"stage 0", {{"a", 0, 10, 0}, {"a", 30, 50, 1}}}, {"stage 1", {{"<b>", 10, 30, 0}}}},
          "A note."};
}

TEST(SpanChart, PutsSpansWhereTheyAre) {
  const std::string svg = pipeline().to_svg();
  expect_one_file(svg);
  expect_texts_inside(svg);
  EXPECT_THAT(svg, HasSubstr("&lt;b&gt;: 10 to 30"));
  const auto x = attributes(svg, R"re(<rect x="([\d.]+)")re");
  const auto widths = attributes(svg, R"re(<rect x="[^"]*" y="[^"]*" width="([\d.]+)")re");
  ASSERT_EQ(x.size(), 5u);  // two in the legend
  const double unit = (std::stod(x[3]) - std::stod(x[2])) / 30;
  EXPECT_NEAR(std::stod(x[4]) - std::stod(x[2]), 10 * unit, 0.02);
  EXPECT_NEAR(std::stod(widths[3]) + 1, 20 * unit, 0.02);
}

TEST(SpanChart, PutsSpansIntoATerminal) {
  EXPECT_EQ(pipeline().to_terminal(58),
            "Two stages\n"
            "stage 0 |a========                    |a##################\n"
            "stage 1           |<b>================\n"
            "        0         10        20        30        40      50\n"
            "time\n"
            "=== forward   ### backward\n"
            "A note.\n");
}

TEST(SpanChart, TakesAnything) {
  std::vector<SpanRow> many(50, {std::string(300, 'n'), {}});
  for (int i = 0; i < 1000; ++i) {
    many[static_cast<std::size_t>(i % 50)].spans.push_back(
        {std::string(static_cast<std::size_t>(i % 7), '&'), i * 0.1, i * 0.1 + 0.01,
         static_cast<std::size_t>(i)});
  }
  for (const SpanChart& chart :
       {SpanChart{}, SpanChart{"", "", {}, {{"no spans", {}}}, ""},
        SpanChart{"",
                  "",
                  {"k"},
                  {{"r", {{"", 1, 1}, {"", 2, 1}, {"", kNan, 2}, {"", 0, kInfinity}}}},
                  ""},
        SpanChart{std::string(400, 'W'),
                  std::string(400, 'x'),
                  {std::string(400, 'k')},
                  many,
                  std::string(400, 'w')}}) {
    expect_one_file(chart.to_svg());
    for (const int columns : {-1, 40, 200}) {
      expect_lines_within(chart.to_terminal(columns), std::max(columns, 40));
    }
  }
}

TEST(SaveSvg, ReplacesTheFileOrNamesIt) {
  const test::TemporaryDirectory directory;
  const auto file = directory.path() / "a.svg";
  save_svg("a longer one", file);
  save_svg("short", file);
  std::ostringstream content;
  content << std::ifstream(file).rdbuf();
  EXPECT_EQ(content.str(), "short");
  for (const auto& wrong : {directory.path(), directory.path() / "none" / "a.svg",
                            std::filesystem::path("/dev/full")}) {
    EXPECT_THAT([&] { save_svg("short", wrong); },
                testing::ThrowsMessage<std::system_error>(
                    HasSubstr("cannot write the chart " + wrong.string() + ": ")))
        << wrong;
  }
}

}  // namespace
}  // namespace paceline::drawing
