#include "drawing/span_chart_scale.h"

#include <cmath>
#include <vector>

namespace paceline::drawing {

bool is_shown(const Span& span) {
  return std::isfinite(span.begin) && std::isfinite(span.end) && span.begin < span.end;
}

Scale scale_of(const SpanChart& chart, int most_ticks) {
  std::vector<double> ends;
  for (const SpanRow& row : chart.rows) {
    for (const Span& span : row.spans) {
      if (is_shown(span)) ends.insert(ends.end(), {span.begin, span.end});
    }
  }
  return {ends, Scale::Kind::linear, Scale::Ends::exact, most_ticks};
}

}  // namespace paceline::drawing
