#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace paceline::drawing {

struct Span {
  std::string label;  // left out where it does not fit
  double begin;
  double end;
  std::size_t kind = 0;  // index into the chart's legend, which gives the colour
};

struct SpanRow {
  std::string name;
  std::vector<Span> spans;
};

// What each row does over time: coloured spans along a common axis. A span is left out unless its
// ends are finite, and the second is after the first.
struct SpanChart {
  std::string title;
  std::string axis_label;
  std::vector<std::string> legend;  // by kind
  std::vector<SpanRow> rows;
  std::string note;  // below the rows; may be empty

  // A whole file; see Svg.
  std::string to_svg() const;
  // Lines of text ended by '\n', at most `columns` wide; narrower than 40 is taken as 40.
  std::string to_terminal(int columns) const;
};

}  // namespace paceline::drawing
