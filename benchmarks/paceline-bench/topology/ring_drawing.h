#pragma once

#include <string>

#include "drawing/span_chart.h"

namespace paceline::bench {

// The steps of ring_all_reduce on `ranks` ranks, one by one: which rank sends which chunk, and what
// each chunk then contains. Lines ended by '\n'.
std::string ring_in_words(int ranks);
// The messages of each rank, by step.
drawing::SpanChart ring_chart(int ranks);

}  // namespace paceline::bench
