#include <fmt/format.h>

#include <algorithm>

#include "drawing/span_chart.h"
#include "drawing/span_chart_scale.h"
#include "drawing/svg.h"

namespace paceline::drawing {
namespace {

constexpr double kSpanChartWidth = 860;
constexpr double kRowHeight = 30;
constexpr double kBoxHeight = 22;
constexpr double kWidestName = 200;
constexpr int kMostTicksOfSpans = 11;

// Where the spans are drawn.
struct SpanPlot {
  double left;
  double right;
  double top;
  double bottom;

  double x(double part) const { return left + part * (right - left); }
};

void draw_axis(Svg& svg, const SpanPlot& plot, const Scale& scale, const std::string& label) {
  for (const double tick : scale.ticks()) {
    const double x = plot.x(scale.position(tick));
    svg.grid_line(x, plot.top, x, plot.bottom);
    svg.text(tick_text(tick), {.x = x, .y = plot.bottom + 18, .anchor = Svg::Anchor::middle});
  }
  svg.text(
      cut_to_width(label, plot.right - plot.left),
      {.x = (plot.left + plot.right) / 2, .y = plot.bottom + 38, .anchor = Svg::Anchor::middle});
}

void draw_span(Svg& svg, const SpanPlot& plot, const Scale& scale, const Span& span, double top) {
  const double left = plot.x(scale.position(span.begin));
  // A gap keeps neighbours apart, and a short span is still visible.
  const double width = std::max(plot.x(scale.position(span.end)) - left - 1, 0.5);
  svg.box(left, top, width, kBoxHeight, palette(span.kind),
          fmt::format("{}: {:.6g} to {:.6g}", span.label, span.begin, span.end));
  if (text_width(span.label) > width - 2) return;
  svg.text(
      span.label,
      {.x = left + width / 2, .y = top + 16, .anchor = Svg::Anchor::middle, .style = "inside"});
}

double widest_name(const std::vector<SpanRow>& rows) {
  double widest = 0;
  for (const SpanRow& row : rows) widest = std::max(widest, text_width(row.name));
  return std::min(widest, kWidestName);
}

}  // namespace

std::string SpanChart::to_svg() const {
  Svg svg(kSpanChartWidth, title);
  svg.heading(title);
  std::vector<LegendEntry> entries;
  for (const std::string& name : legend) entries.push_back({name, palette(entries.size())});
  const double top =
      draw_legend(svg, entries, Svg::kMargin, kSpanChartWidth - Svg::kMargin, Svg::kHeadingEnd) +
      14;
  const double names = widest_name(rows);
  const SpanPlot plot{Svg::kMargin + names + 10, kSpanChartWidth - 2 * Svg::kMargin, top,
                      top + kRowHeight * static_cast<double>(rows.size())};
  const Scale scale = scale_of(*this, kMostTicksOfSpans);
  draw_axis(svg, plot, scale, axis_label);
  double y = top + (kRowHeight - kBoxHeight) / 2;
  for (const SpanRow& row : rows) {
    svg.text(cut_to_width(row.name, names), {.x = Svg::kMargin, .y = y + 16, .style = "ink"});
    for (const Span& span : row.spans) {
      if (is_shown(span)) draw_span(svg, plot, scale, span, y);
    }
    y += kRowHeight;
  }
  const double end =
      draw_paragraph(svg, note, Svg::kMargin, kSpanChartWidth - Svg::kMargin, plot.bottom + 46);
  return svg.str(end + 12);
}

}  // namespace paceline::drawing
