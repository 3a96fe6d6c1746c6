#pragma once

#include <cstddef>
#include <span>

#include "shm/kernels/types.h"

namespace paceline::shm {

inline constexpr std::size_t kMaxSources = 64;

// Reduces `count` elements of every source, in the order of `sources`, and writes the result to
// every destination. Pointers need no alignment. A destination may be one of the sources;
// otherwise ranges must not overlap. `type` must be reducible with `op`, and `sources` one to
// kMaxSources.
//
// In the default floating-point environment the result is the same bit for bit for any alignment,
// count, slicing and instruction set. These hold for one source too:
//
// - float16 and bfloat16 accumulate in float32 and round once, to nearest even; other types
//   accumulate in their own type, and no multiply-add is fused.
// - avg divides the sum by sources.size(), in the type it accumulates in.
// - Integers wrap; avg wraps the sum and truncates the quotient towards zero.
// - boolean takes every byte but 0 for true and yields 0 or 1. sum and max are or; product and min
//   are and.
// - Complex numbers are reduced component by component, but for product: (a + bi)(c + di) is
//   (ac - bd) + (ad + bc)i, also for infinite components.
// - A NaN in any source makes the result the canonical quiet NaN (positive, no payload), for min
//   and max too. In complex numbers the rule holds for each component, after the arithmetic.
// - For min and max -0.0 equals +0.0, and of equals the first is kept.
void reduce(DataType type, ReduceOp op, std::span<const void* const> sources,
            std::span<void* const> destinations, std::size_t count);

// As reduce with sum, but each source counts weights[k] times: the weight, rounded to the type that
// is accumulated in, multiplies each element before it is added. For floating and complex types.
void reduce_weighted(DataType type, std::span<const void* const> sources,
                     std::span<const double> weights, std::span<void* const> destinations,
                     std::size_t count);

// The two halves of reduce, for sums that are joined with others before they are completed. Bit for
// bit, accumulate and then complete of its one partial sum is reduce, with sources.size() as
// divisor, or reduce_weighted.
//
// Writes the reduction of all sources to `sums`: `count` elements of accumulation_type(type), in
// the order of the sources' elements and with no NaN but the canonical one. avg adds up. `weights`
// as in reduce_weighted, or empty; with weights, `op` must be sum.
void accumulate(DataType type, ReduceOp op, std::span<const void* const> sources,
                std::span<const double> weights, void* sums, std::size_t count);
// Combines one to kMaxSources partial sums of accumulation_type(type) in the order of `sums`, for
// avg divides by `divisor`, at least 1, and writes the result as elements of `type` to every
// destination.
void complete(DataType type, ReduceOp op, std::span<const void* const> sums, std::size_t divisor,
              std::span<void* const> destinations, std::size_t count);

using ReduceFunction = decltype(&reduce);
using ReduceWeightedFunction = decltype(&reduce_weighted);
using AccumulateFunction = decltype(&accumulate);
using CompleteFunction = decltype(&complete);
struct Kernels {
  ReduceFunction reduce;
  ReduceWeightedFunction reduce_weighted;
  AccumulateFunction accumulate;
  CompleteFunction complete;
};

// One entry per instruction set this processor can run, slowest first. For tests.
std::span<const Kernels> kernel_variants();

}  // namespace paceline::shm
