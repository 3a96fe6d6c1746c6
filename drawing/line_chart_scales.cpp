#include "drawing/line_chart_scales.h"

#include <algorithm>
#include <iterator>

namespace paceline::drawing {

LineChartScales::LineChartScales(const LineChart& chart, int most_x_ticks, int most_y_ticks)
    : x({}, chart.x.kind, Scale::Ends::exact, most_x_ticks),
      y({}, chart.y.kind, Scale::Ends::round, most_y_ticks) {
  std::vector<double> all_x;
  std::vector<double> all_y;
  for (const Line& line : chart.lines) {
    for (const Point& point : shown(line)) {
      all_x.push_back(point.x);
      all_y.push_back(point.y);
    }
  }
  x = Scale(all_x, chart.x.kind, Scale::Ends::exact, most_x_ticks);
  y = Scale(all_y, chart.y.kind, Scale::Ends::round, most_y_ticks);
}

std::vector<Point> LineChartScales::shown(const Line& line) const {
  std::vector<Point> result;
  std::ranges::copy_if(line.points, std::back_inserter(result),
                       [this](const Point& one) { return x.shows(one.x) && y.shows(one.y); });
  return result;
}

}  // namespace paceline::drawing
