#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace paceline::drawing {

// An SVG file with a background of its own, which is dark where the reader prefers that. It needs
// no other file and has no script. Coordinates are in pixels, from the top left.
class Svg {
 public:
  enum class Anchor { start, middle, end };
  static constexpr double kFontSize = 13;
  static constexpr double kMargin = 16;
  static constexpr double kHeadingEnd = 34;

  // `title` names the drawing for readers who do not see it.
  explicit Svg(double width, std::string title);

  struct Label {
    double x;
    double y;  // of its baseline
    Anchor anchor = Anchor::start;
    const char* style = "soft";  // "ink", "soft" or "inside"
    bool upwards = false;        // reads from the bottom to the top
  };
  void text(std::string_view text, const Label& label);
  // At the top, between the margins.
  void heading(std::string_view text);
  void grid_line(double x1, double y1, double x2, double y2);
  void polyline(const std::vector<std::pair<double, double>>& points, std::string_view colour,
                bool dashed);
  // `hover`: what is shown where the mouse is.
  void dot(double x, double y, std::string_view colour, std::string_view hover);
  void box(double x, double y, double width, double height, std::string_view colour,
           std::string_view hover);

  // The whole file, `height` high.
  std::string str(double height) const;

 private:
  double width_;
  std::string title_;
  std::string body_;
};

// What stands for what; each has a sample of its line or colour before its name.
struct LegendEntry {
  std::string name;
  std::string_view colour;
  bool line = false;
  bool dashed = false;
};
// Draws the entries in rows from `left` to `right`, the first row below `y`. Returns where the last
// one ends.
double draw_legend(Svg& svg, const std::vector<LegendEntry>& entries, double left, double right,
                   double y);
// Draws the text in lines from `left` to `right`, the first one below `y`. Returns where the last
// one ends.
double draw_paragraph(Svg& svg, std::string_view text, double left, double right, double y);

// An upper bound for the width of a text in common fonts.
double text_width(std::string_view text);
// The text, cut so that it is not wider than that.
std::string cut_to_width(std::string_view text, double width);
// A colour on which white text is readable, as a line of it is on white and on black. They repeat.
std::string_view palette(std::size_t number);

}  // namespace paceline::drawing
