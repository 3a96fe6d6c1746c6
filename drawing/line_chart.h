#pragma once

#include <string>
#include <vector>

#include "drawing/scale.h"

namespace paceline::drawing {

struct Point {
  double x;
  double y;
};

struct Line {
  std::string name;
  std::vector<Point> points;  // in the order in which they are joined
  bool dashed = false;        // as of a theory, beside what was measured
};

struct Axis {
  std::string label;
  Scale::Kind kind = Scale::Kind::linear;
};

// Lines over common axes, with a legend. A point that the axes cannot show (infinite, or not
// positive on a logarithmic axis) is left out, and its line goes on behind it.
struct LineChart {
  std::string title;
  Axis x;
  Axis y;
  std::vector<Line> lines;

  // A whole file; see Svg.
  std::string to_svg() const;
  // Lines of text ended by '\n', at most `columns` wide; narrower than 40 is taken as 40.
  std::string to_terminal(int columns) const;
};

}  // namespace paceline::drawing
