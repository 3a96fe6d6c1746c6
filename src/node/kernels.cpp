#include "node/kernels.h"

#ifdef PACELINE_KERNELS_AVX2
#include <cpuid.h>
#endif

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

namespace {

// Not every compiler's __builtin_cpu_supports knows F16C.
bool runs_avx2() {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  return __builtin_cpu_supports("avx2") != 0 && __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 &&
         (ecx & bit_F16C) != 0;
}

}  // namespace
#endif

std::span<const ReduceFunction> reduce_variants() {
#ifdef PACELINE_KERNELS_AVX2
  static constexpr std::array<ReduceFunction, 2> variants{&baseline::reduce, &avx2::reduce};
  static const std::size_t usable = runs_avx2() ? 2 : 1;
  return std::span(variants).first(usable);
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
