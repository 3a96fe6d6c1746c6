#pragma once

#include <vector>

#include "drawing/line_chart.h"
#include "drawing/scale.h"

namespace paceline::drawing {

// The axes of a chart, for `most_ticks` on each.
struct LineChartScales {
  Scale x;
  Scale y;

  LineChartScales(const LineChart& chart, int most_x_ticks, int most_y_ticks);
  // The points of a line that both show.
  std::vector<Point> shown(const Line& line) const;
};

}  // namespace paceline::drawing
