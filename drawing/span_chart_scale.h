#pragma once

#include "drawing/scale.h"
#include "drawing/span_chart.h"

namespace paceline::drawing {

bool is_shown(const Span& span);
// From the first begin to the last end.
Scale scale_of(const SpanChart& chart, int most_ticks);

}  // namespace paceline::drawing
