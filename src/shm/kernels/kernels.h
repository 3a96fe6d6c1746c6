#pragma once

#include <cstddef>
#include <span>

#include "shm/kernels/tree.h"
#include "shm/kernels/types.h"

namespace paceline::shm {

// What is reduced.
struct Terms {
  std::span<const void* const> sources;  // one to kMaxSources
  std::span<const double> weights = {};  // of each source; empty: not weighted
  std::span<const int> leaves = {};      // of each source the first leaf, as Tree takes them
};

// Reduces `count` elements of every source in the order of a Tree, and writes the result to every
// destination. Pointers need no alignment. A destination may be one of the sources; otherwise
// ranges must not overlap. `type` must be reducible with `op`.
//
// In the default floating-point environment the result is the same bit for bit for any alignment,
// count, slicing and instruction set. These hold for one source too:
//
// - float16 and bfloat16 accumulate in float32 and round once, to nearest even; other types
//   accumulate in their own type, and no multiply-add is fused.
// - A weight, rounded to the type that is accumulated in, multiplies each element of its source
//   first. Only for sum and avg of floating and complex types.
// - avg divides the sum by `divisor`, at least 1 without weights, in the type it accumulates in.
// - Integers wrap; avg wraps the sum and truncates the quotient towards zero.
// - boolean takes every byte but 0 for true and yields 0 or 1. sum and max are or; product and min
//   are and.
// - Complex numbers are reduced component by component, but for product: (a + bi)(c + di) is
//   (ac - bd) + (ad + bc)i, also for infinite components.
// - A NaN in any source makes the result the canonical quiet NaN (positive, no payload), for min
//   and max too. In complex numbers the rule holds for each component, after the arithmetic.
// - For min and max -0.0 equals +0.0, and of equals the first is kept.
void reduce(DataType type, ReduceOp op, const Terms& terms, double divisor,
            std::span<void* const> destinations, std::size_t count);
inline void reduce(DataType type, ReduceOp op, std::span<const void* const> sources,
                   std::span<void* const> destinations, std::size_t count) {
  reduce(type, op, {.sources = sources}, static_cast<double>(sources.size()), destinations, count);
}

// The two halves of reduce. Bit for bit, accumulate and then complete is reduce, also if several
// calls of accumulate reduce one node of the tree each, and complete has these as sources.
//
// Writes the reduction of all sources to `sums`: `count` elements of accumulation_type(type), in
// the order of the sources' elements and with no NaN but the canonical one. avg adds up.
void accumulate(DataType type, ReduceOp op, const Terms& terms, void* sums, std::size_t count);
// As reduce, from sources of accumulation_type(type).
void complete(DataType type, ReduceOp op, const Terms& sums, double divisor,
              std::span<void* const> destinations, std::size_t count);

struct Kernels {
  void (*reduce)(DataType, ReduceOp, const Terms&, double, std::span<void* const>, std::size_t);
  void (*accumulate)(DataType, ReduceOp, const Terms&, void*, std::size_t);
  void (*complete)(DataType, ReduceOp, const Terms&, double, std::span<void* const>, std::size_t);
};

// One entry per instruction set this processor can run, slowest first. For tests.
std::span<const Kernels> kernel_variants();

}  // namespace paceline::shm
