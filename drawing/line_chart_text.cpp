#include <algorithm>
#include <array>
#include <cmath>

#include "drawing/canvas.h"
#include "drawing/line_chart.h"
#include "drawing/line_chart_scales.h"
#include "drawing/text.h"

namespace paceline::drawing {
namespace {

constexpr int kLeastColumns = 40;
constexpr int kRows = 18;  // of the plot
constexpr int kMostYTicks = 7;
constexpr int kColumnsOfXTick = 8;
// Marks of the points, and what joins them.
constexpr std::array<std::string_view, 8> kMarks{"o", "x", "*", "#", "@", "%", "&", "$"};
constexpr std::string_view kJoint = ".";

std::string_view mark_of(std::size_t line) {
  return kMarks[line % kMarks.size()];
}

// Rows 0 to kRows - 1 of the canvas, shifted.
struct TextPlot {
  int left;
  int right;  // the last column
  int top;

  int column(double part) const {
    return left + static_cast<int>(std::lround(part * (right - left)));
  }
  int row(double part) const {
    return top + static_cast<int>(std::lround((1 - part) * (kRows - 1)));
  }
};

void put_axes(Canvas& canvas, const TextPlot& plot, const LineChartScales& scales) {
  for (int row = plot.top; row < plot.top + kRows; ++row) canvas.put(row, plot.left - 1, "|");
  const int bottom = plot.top + kRows;
  canvas.put(bottom, plot.left - 1,
             "+" + std::string(static_cast<std::size_t>(plot.right - plot.left + 1), '-'));
  for (const double tick : scales.y.ticks()) {
    const std::string text = tick_text(tick);
    canvas.put(plot.row(scales.y.position(tick)), plot.left - 2 - columns_of(text), text + " +");
  }
  int free_from = 0;
  for (const double tick : scales.x.ticks()) {
    const std::string text = tick_text(tick);
    const int middle = plot.column(scales.x.position(tick));
    const int begin = std::min(middle - columns_of(text) / 2, plot.right + 1 - columns_of(text));
    if (begin < free_from) continue;
    canvas.put(bottom, middle, "+");
    canvas.put(bottom + 1, begin, text);
    free_from = begin + columns_of(text) + 1;
  }
}

// Joints first, so that no line hides a mark of another.
void put_joints(Canvas& canvas, const TextPlot& plot, const LineChartScales& scales,
                const std::vector<Point>& points) {
  for (std::size_t i = 1; i < points.size(); ++i) {
    const double from_x = scales.x.position(points[i - 1].x);
    const double from_y = scales.y.position(points[i - 1].y);
    const double to_x = scales.x.position(points[i].x);
    const double to_y = scales.y.position(points[i].y);
    const int steps = std::max(std::abs(plot.column(to_x) - plot.column(from_x)),
                               std::abs(plot.row(to_y) - plot.row(from_y)));
    for (int step = 1; step < steps; ++step) {
      const double part = static_cast<double>(step) / steps;
      canvas.put(plot.row(std::lerp(from_y, to_y, part)),
                 plot.column(std::lerp(from_x, to_x, part)), kJoint);
    }
  }
}

}  // namespace

std::string LineChart::to_terminal(int columns) const {
  Canvas canvas(std::max(columns, kLeastColumns));
  canvas.append(words_of(title), 1);
  canvas.append({y.label}, 0);
  const LineChartScales scales(*this, std::max(canvas.columns() / kColumnsOfXTick, 2), kMostYTicks);
  int widest = 0;
  for (const double tick : scales.y.ticks()) {
    widest = std::max(widest, columns_of(tick_text(tick)));
  }
  const TextPlot plot{widest + 2, canvas.columns() - 2, canvas.rows()};
  put_axes(canvas, plot, scales);
  for (const Line& line : lines) {
    if (!line.dashed) put_joints(canvas, plot, scales, scales.shown(line));
  }
  std::vector<std::string> legend;
  for (const Line& line : lines) {
    const std::string mark(mark_of(legend.size()));
    for (const Point& point : scales.shown(line)) {
      canvas.put(plot.row(scales.y.position(point.y)), plot.column(scales.x.position(point.x)),
                 mark);
    }
    legend.push_back(mark + ' ' + line.name);
  }
  const std::string label = cut_to(x.label, canvas.columns());
  canvas.put(canvas.rows(), (canvas.columns() - columns_of(label)) / 2, label);
  canvas.append(legend, 3);
  return canvas.str();
}

}  // namespace paceline::drawing
