#include "topology/chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "measure/statistics.h"
#include "nodes/rate.h"
#include "table.h"
#include "topology/theory.h"

namespace paceline::bench {
namespace {

// The line of this name, which is added if there is none.
drawing::Line& line_of(std::vector<drawing::Line>& lines, const std::string& name, bool dashed) {
  const auto found = std::ranges::find(lines, name, &drawing::Line::name);
  return found != lines.end() ? *found : lines.emplace_back(drawing::Line{name, {}, dashed});
}

void add_theory(const Options& options, const Result& result, std::vector<drawing::Line>& theory) {
  for (const Series& series : result.series) {
    const auto [formula, us] = theory_of(series.implementation, result.ranks, options.bytes.front(),
                                         bytes_per_second(options.link));
    auto& points = line_of(theory, formula, true).points;
    if (points.empty() || points.back().x != result.ranks) {
      points.push_back({static_cast<double>(result.ranks), us / 1e3});
    }
  }
}

}  // namespace

drawing::LineChart topology_chart(const Options& options, const std::vector<Result>& results) {
  const std::string where = has_links(options)
                                ? fmt::format("a node for each rank, links of {}", options.link)
                                : "on one machine";
  drawing::LineChart chart{
      fmt::format("All-reduce of K = {}, {}", describe_bytes(options.bytes.front()), where),
      {"N, the number of ranks"},
      {"time in ms"},
      {}};
  std::vector<drawing::Line> theory;
  for (const Result& result : results) {
    for (const Series& series : result.series) {
      line_of(chart.lines, series.implementation, false)
          .points.push_back(
              {static_cast<double>(result.ranks), quantile(series.wall_us, 0.5) / 1e3});
    }
    if (has_links(options)) add_theory(options, result, theory);
  }
  chart.lines.insert(chart.lines.end(), theory.begin(), theory.end());
  return chart;
}

}  // namespace paceline::bench
