// The reduction kernels, compiled once per instruction set: the including file defines
// PACELINE_KERNEL_NAMESPACE and is compiled with that set's flags and -ffp-contract=off.
// Everything here has internal linkage, or the linker would merge the variants into one.

#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <type_traits>

#include "node/kernels.h"

namespace paceline::node::PACELINE_KERNEL_NAMESPACE {
namespace {

// Accumulators of one block stay in the first-level cache, next to one block of a source.
constexpr std::size_t kBlock = 1024;

struct BFloat16 {
  std::uint16_t bits;
};

template <typename T>
struct Accumulator {
  using Type = T;
};
template <>
struct Accumulator<BFloat16> {
  using Type = float;
};
template <typename T>
using AccumulatorOf = typename Accumulator<T>::Type;

inline float load(BFloat16 value) {
  const std::uint32_t bits = std::uint32_t{value.bits} << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}
template <typename T>
inline T load(T value) {
  return value;
}

template <typename T>
inline T canonical(T value) {
  if constexpr (std::is_floating_point_v<T>) {
    return value != value ? std::numeric_limits<T>::quiet_NaN() : value;
  } else {
    return value;
  }
}

// Never sees a NaN other than the canonical one, whose upper half is a NaN too.
inline void store(BFloat16& target, float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const std::uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  target.bits = static_cast<std::uint16_t>((value != value ? bits : rounded) >> 16);
}
template <typename T>
inline void store(T& target, T value) {
  target = value;
}

template <typename T, ReduceOp op>
inline T combine(T sum, T value) {
  if constexpr (op == ReduceOp::min) {
    return (value < sum) | (value != value) ? value : sum;
  } else if constexpr (op == ReduceOp::max) {
    return (value > sum) | (value != value) ? value : sum;
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<std::make_unsigned_t<T>>(sum) +
                          static_cast<std::make_unsigned_t<T>>(value));
  } else {
    return sum + value;
  }
}

template <typename T, ReduceOp op>
void reduce_block(std::span<const void* const> sources, std::span<void* const> destinations,
                  std::size_t first, std::size_t count) {
  using A = AccumulatorOf<T>;
  alignas(64) A sums[kBlock];
  const auto source = [&](std::size_t k) { return static_cast<const T*>(sources[k]) + first; };

  const T* const a = source(0);
  if (sources.size() == 1) {
    for (std::size_t i = 0; i < count; ++i) sums[i] = load(a[i]);
  } else {
    const T* const b = source(1);
    for (std::size_t i = 0; i < count; ++i) sums[i] = combine<A, op>(load(a[i]), load(b[i]));
  }
  for (std::size_t k = 2; k < sources.size(); ++k) {
    const T* const c = source(k);
    for (std::size_t i = 0; i < count; ++i) sums[i] = combine<A, op>(sums[i], load(c[i]));
  }
  if constexpr (op == ReduceOp::avg) {
    const A divisor = static_cast<A>(sources.size());
    for (std::size_t i = 0; i < count; ++i) sums[i] /= divisor;
  }

  alignas(64) T results[kBlock];
  for (std::size_t i = 0; i < count; ++i) store(results[i], canonical(sums[i]));
  for (void* const destination : destinations) {
    std::memcpy(static_cast<T*>(destination) + first, results, count * sizeof(T));
  }
}

template <typename T, ReduceOp op>
void reduce_all(std::span<const void* const> sources, std::span<void* const> destinations,
                std::size_t count) {
  for (std::size_t first = 0; first < count; first += kBlock) {
    reduce_block<T, op>(sources, destinations, first,
                        count - first < kBlock ? count - first : kBlock);
  }
}

template <typename T>
void reduce_typed(ReduceOp op, std::span<const void* const> sources,
                  std::span<void* const> destinations, std::size_t count) {
  switch (op) {
    case ReduceOp::sum:
      return reduce_all<T, ReduceOp::sum>(sources, destinations, count);
    case ReduceOp::min:
      return reduce_all<T, ReduceOp::min>(sources, destinations, count);
    case ReduceOp::max:
      return reduce_all<T, ReduceOp::max>(sources, destinations, count);
    case ReduceOp::avg:
      if constexpr (!std::is_integral_v<T>) {
        return reduce_all<T, ReduceOp::avg>(sources, destinations, count);
      }
  }
}

}  // namespace

void reduce(DataType type, ReduceOp op, std::span<const void* const> sources,
            std::span<void* const> destinations, std::size_t count) {
  switch (type) {
    case DataType::float32:
      return reduce_typed<float>(op, sources, destinations, count);
    case DataType::float64:
      return reduce_typed<double>(op, sources, destinations, count);
    case DataType::bfloat16:
      return reduce_typed<BFloat16>(op, sources, destinations, count);
    case DataType::int64:
      return reduce_typed<std::int64_t>(op, sources, destinations, count);
    case DataType::byte:
      return;
  }
}

}  // namespace paceline::node::PACELINE_KERNEL_NAMESPACE
