#include "shm/kernels/kernels.h"

#ifdef PACELINE_KERNELS_AVX2
#include <cpuid.h>
#endif

#include <array>

namespace paceline::shm {

// One for each kernels_*.cpp.
namespace baseline {
extern const Kernels kernels;
}
#ifdef PACELINE_KERNELS_AVX2
namespace avx2 {
extern const Kernels kernels;
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

std::span<const Kernels> kernel_variants() {
#ifdef PACELINE_KERNELS_AVX2
  static const std::array<Kernels, 2> variants{baseline::kernels, avx2::kernels};
  static const std::size_t usable = runs_avx2() ? 2 : 1;
  return std::span(variants).first(usable);
#else
  static const std::array<Kernels, 1> variants{baseline::kernels};
  return variants;
#endif
}

namespace {

const Kernels& fastest() {
  static const Kernels& kernels = kernel_variants().back();
  return kernels;
}

}  // namespace

void reduce(DataType type, ReduceOp op, const Terms& terms, double divisor,
            std::span<void* const> destinations, std::size_t count) {
  fastest().reduce(type, op, terms, divisor, destinations, count);
}

void accumulate(DataType type, ReduceOp op, const Terms& terms, void* sums, std::size_t count) {
  fastest().accumulate(type, op, terms, sums, count);
}

void complete(DataType type, ReduceOp op, const Terms& sums, double divisor,
              std::span<void* const> destinations, std::size_t count) {
  fastest().complete(type, op, sums, divisor, destinations, count);
}

}  // namespace paceline::shm
