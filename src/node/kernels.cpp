#include "node/kernels.h"

#include <array>

namespace paceline::node {

// One for each kernels_*.cpp.
namespace baseline {
void reduce(DataType, ReduceOp, std::span<const void* const>, std::span<void* const>, std::size_t);
}
#ifdef PACELINE_KERNELS_AVX2
namespace avx2 {
void reduce(DataType, ReduceOp, std::span<const void* const>, std::span<void* const>, std::size_t);
}
#endif

std::span<const ReduceFunction> reduce_variants() {
#ifdef PACELINE_KERNELS_AVX2
  static constexpr std::array<ReduceFunction, 2> variants{&baseline::reduce, &avx2::reduce};
  static const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
  return std::span(variants).first(has_avx2 ? 2 : 1);
#else
  static constexpr std::array<ReduceFunction, 1> variants{&baseline::reduce};
  return variants;
#endif
}

void reduce(DataType type, ReduceOp op, std::span<const void* const> sources,
            std::span<void* const> destinations, std::size_t count) {
  static const ReduceFunction fastest = reduce_variants().back();
  fastest(type, op, sources, destinations, count);
}

}  // namespace paceline::node
