#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "report/page/axis.h"
#include "report/page/html.h"
#include "report/page/page.h"
#include "report/units.h"

namespace paceline::report {
namespace {

constexpr std::size_t kPoints = 300;
constexpr int kChartHeight = 180;

// Medians of `values` in as many groups as can be drawn.
std::vector<double> thinned(const std::vector<double>& values) {
  std::vector<double> result;
  const std::size_t points = std::min(kPoints, values.size());
  for (std::size_t i = 0; i < points; ++i) {
    const auto begin = values.begin() + static_cast<std::ptrdiff_t>(i * values.size() / points);
    const auto end = values.begin() + static_cast<std::ptrdiff_t>((i + 1) * values.size() / points);
    result.push_back(median({begin, end}));
  }
  return result;
}

// Of all but the highest few: one outlier must not flatten the rest.
double top_of(std::vector<double> values) {
  const auto nearly_last = values.begin() + static_cast<std::ptrdiff_t>(values.size() * 98 / 100);
  std::ranges::nth_element(values, nearly_last);
  return std::max(*nearly_last * 1.15, 0.001);
}

std::string line(const std::vector<double>& values, double top, const std::string& colour,
                 const std::string& title) {
  std::string points;
  const double last = std::max<double>(1, static_cast<double>(values.size()) - 1);
  for (std::size_t i = 0; i < values.size(); ++i) {
    points += fmt::format("{:.1f},{:.2f} ", 1000 * static_cast<double>(i) / last,
                          100 - 100 * std::min(values[i] / top, 2.0));
  }
  return fmt::format(R"(<polyline class="{}" points="{}"><title>{}</title></polyline>)", colour,
                     points, escaped(title));
}

// The labels stand beside the chart, whose drawing is stretched.
std::string labels(double top) {
  std::string svg = fmt::format(R"(<svg class="loose" height="{}">)", kChartHeight);
  for (const double tick : axis_ticks(top)) {
    svg += fmt::format(R"(<text x="0" y="{:.1f}" dy="{}">{}</text>)",
                       kChartHeight * (1 - tick / top), tick == 0 ? 0 : 4, tick_text(tick));
  }
  return svg + "</svg>";
}

std::string grid(double top) {
  std::string svg;
  for (const double tick : axis_ticks(top)) {
    svg += fmt::format(R"(<line class="grid" x1="0" x2="1000" y1="{0:.2f}" y2="{0:.2f}" )"
                       R"(vector-effect="non-scaling-stroke"/>)",
                       100 * (1 - tick / top));
  }
  return svg;
}

}  // namespace

std::string time_bars(const Analysis& analysis) {
  std::string html;
  for (const RankTimes& one : analysis.ranks) {
    const std::pair<double, const char*> parts[] = {{one.computing, "backward"},
                                                    {one.late, "late"},
                                                    {one.communication, "comm"},
                                                    {one.between, "between"}};
    double whole = 0;
    for (const auto& [time, colour] : parts) whole += std::max(time, 0.0);
    html += fmt::format(R"(<div class="row"><div>rank {}</div><svg height="20">)", one.rank);
    double at = 0;
    for (const auto& [time, colour] : parts) {
      const double width = whole > 0 ? std::max(time, 0.0) / whole : 0;
      html += fmt::format(
          R"(<rect class="{}" x="{}" width="{}" height="20"><title>{} a step</title></rect>)",
          colour, percent(at), percent(width), time_text(time));
      if (width > 0.07) {
        html += fmt::format(R"(<text class="in" x="{}" dx="5" y="14">{}</text>)", percent(at),
                            share_text(width));
      }
      at += width;
    }
    html += "</svg></div>\n";
  }
  return html;
}

std::string step_times(const Job& job, const Analysis& analysis, const Diagnosis& diagnosis) {
  std::vector<double> periods;
  for (const Step& step : analysis.steps) periods.push_back(step.period());
  periods = thinned(periods);
  const double top = top_of(periods);
  std::string lines;
  std::string named;
  for (std::size_t i = 0; i < job.ranks.size(); ++i) {
    std::vector<double> computing;
    for (const Step& step : analysis.steps) computing.push_back(step.ranks[i].computing());
    const int rank = job.ranks[i].rank;
    const bool is_named = rank == diagnosis.rank;
    (is_named ? named : lines) += line(thinned(computing), top, is_named ? "fault" : "backward",
                                       fmt::format("rank {}: computing", rank));
  }
  std::string html = fmt::format(R"(<div class="row chart"><div>{}</div><svg height="{}" )"
                                 R"(viewBox="0 0 1000 100" preserveAspectRatio="none">)",
                                 labels(top), kChartHeight);
  html += grid(top) + lines + named + line(periods, top, "ink", "a whole step, mean of all ranks");
  return html + fmt::format(R"(</svg></div><div class="row"><div></div><svg height="16">)"
                            R"(<text x="0" y="11">step {}</text>)"
                            R"(<text x="100%" y="11" text-anchor="end">step {}</text></svg></div>)",
                            analysis.steps.front().number, analysis.steps.back().number);
}

}  // namespace paceline::report
