#pragma once

#include "benchmarks/drawing/scale.h"
#include "benchmarks/drawing/span_chart.h"

namespace paceline::drawing {

bool is_shown(const Span& span);
// From the first begin to the last end.
Scale scale_of(const SpanChart& chart, int most_ticks);

}  // namespace paceline::drawing
