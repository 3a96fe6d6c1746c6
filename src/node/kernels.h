#pragma once

#include <cstddef>
#include <span>

#include "node/types.h"

namespace paceline::node {

// Reduces `count` elements of every source, in the order of `sources`, and writes the result to
// every destination. A destination may be one of the sources; otherwise ranges must not overlap.
//
// The result is the same bit for bit whatever the alignment, the count, the slicing and the
// instruction set. bfloat16 accumulates in float32 and rounds once, to nearest even; other types
// accumulate in themselves. int64 wraps. avg divides the sum by sources.size(). A NaN in any source
// makes the result the canonical quiet NaN, for min and max too.
//
// `type` must be reducible; avg needs a floating type; sources must not be empty.
void reduce(DataType type, ReduceOp op, std::span<const void* const> sources,
            std::span<void* const> destinations, std::size_t count);

using ReduceFunction = decltype(&reduce);

// One entry per instruction set this processor can run, slowest first. For tests.
std::span<const ReduceFunction> reduce_variants();

}  // namespace paceline::node
