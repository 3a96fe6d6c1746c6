#include <fmt/format.h>

#include <algorithm>

#include "drawing/line_chart.h"
#include "drawing/line_chart_scales.h"
#include "drawing/svg.h"

namespace paceline::drawing {
namespace {

constexpr double kLineChartWidth = 720;
constexpr double kPlotHeight = 320;
constexpr int kMostTicksOfLines = 9;
constexpr std::size_t kMostDots = 40;  // more of them would hide their line

// Where the lines are drawn.
struct Plot {
  double left;
  double right;
  double top;
  double bottom;

  double x(double part) const { return left + part * (right - left); }
  double y(double part) const { return bottom - part * (bottom - top); }
};

double widest(const std::vector<double>& ticks) {
  double width = 0;
  for (const double tick : ticks) width = std::max(width, text_width(tick_text(tick)));
  return width;
}

void draw_x_axis(Svg& svg, const Plot& plot, const Scale& scale, const std::string& label) {
  double free_from = 0;
  for (const double tick : scale.ticks()) {
    const double x = plot.x(scale.position(tick));
    svg.grid_line(x, plot.top, x, plot.bottom);
    const double half = text_width(tick_text(tick)) / 2;
    if (x - half < free_from) continue;
    svg.text(tick_text(tick), {.x = x, .y = plot.bottom + 18, .anchor = Svg::Anchor::middle});
    free_from = x + half + 4;
  }
  svg.text(
      cut_to_width(label, plot.right - plot.left),
      {.x = (plot.left + plot.right) / 2, .y = plot.bottom + 38, .anchor = Svg::Anchor::middle});
}

void draw_y_axis(Svg& svg, const Plot& plot, const Scale& scale, const std::string& label) {
  for (const double tick : scale.ticks()) {
    const double y = plot.y(scale.position(tick));
    svg.grid_line(plot.left, y, plot.right, y);
    svg.text(tick_text(tick), {.x = plot.left - 6, .y = y + 4, .anchor = Svg::Anchor::end});
  }
  svg.text(cut_to_width(label, plot.bottom - plot.top), {.x = Svg::kMargin + Svg::kFontSize - 2,
                                                         .y = (plot.top + plot.bottom) / 2,
                                                         .anchor = Svg::Anchor::middle,
                                                         .upwards = true});
}

void draw_line(Svg& svg, const Plot& plot, const LineChartScales& scales, const Line& line,
               std::string_view colour) {
  const std::vector<Point> points = scales.shown(line);
  std::vector<std::pair<double, double>> places;
  for (const Point& point : points) {
    places.emplace_back(plot.x(scales.x.position(point.x)), plot.y(scales.y.position(point.y)));
  }
  svg.polyline(places, colour, line.dashed);
  if (line.dashed || points.size() > kMostDots) return;
  for (std::size_t i = 0; i < points.size(); ++i) {
    svg.dot(places[i].first, places[i].second, colour,
            fmt::format("{}: {:.6g}, {:.6g}", line.name, points[i].x, points[i].y));
  }
}

}  // namespace

std::string LineChart::to_svg() const {
  const LineChartScales scales(*this, kMostTicksOfLines, kMostTicksOfLines);
  Svg svg(kLineChartWidth, title);
  svg.heading(title);
  std::vector<LegendEntry> legend;
  for (const Line& line : lines) {
    legend.push_back({line.name, palette(legend.size()), true, line.dashed});
  }
  const double legend_end =
      draw_legend(svg, legend, Svg::kMargin, kLineChartWidth - Svg::kMargin, Svg::kHeadingEnd);
  const double top = legend_end + 22;
  const Plot plot{Svg::kMargin + Svg::kFontSize + 12 + widest(scales.y.ticks()),
                  kLineChartWidth - 2 * Svg::kMargin, top, top + kPlotHeight};
  draw_x_axis(svg, plot, scales.x, x.label);
  draw_y_axis(svg, plot, scales.y, y.label);
  for (std::size_t i = 0; i < lines.size(); ++i) {
    draw_line(svg, plot, scales, lines[i], palette(i));
  }
  return svg.str(plot.bottom + 52);
}

}  // namespace paceline::drawing
