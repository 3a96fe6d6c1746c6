#pragma once

#include <cstddef>

#include <paceline/distributed.h>

#include "trace/span.h"

namespace paceline::ddp {

// Measures what the reduction of a bucket on the CPU costs in this group while its ranks do nothing
// else, with buckets of one element and of `bytes`, or of the default cap of a bucket if that is
// less. Collective. With a large model over a network of 1 Gbit/s it takes a second.
trace::ReductionCost reduction_cost(const ProcessGroup& group, std::size_t bytes);

}  // namespace paceline::ddp
