#pragma once

#include <cstddef>
#include <cstdint>

#include "internode/engine.h"

namespace paceline::internode {

// Tags of a step's buckets; the index after the last is tag_after()'s. The epoch tells messages of
// aborted steps from later ones, and the rest tells apart what is under way at the same time.
constexpr std::size_t kMaxBuckets = (std::size_t{1} << 14) - 1;

inline std::uint32_t tag_of(std::uint32_t epoch, std::uint32_t step, std::size_t bucket,
                            std::uint32_t phase) {
  constexpr std::uint32_t kIndices = kMaxBuckets + 1;
  constexpr std::uint32_t kEpochs = Engine::kTags / (4 * kIndices);
  const std::uint32_t of_step = (epoch % kEpochs) * 2 + step % 2;
  return (of_step * kIndices + static_cast<std::uint32_t>(bucket)) * 2 + phase;
}

// Of what two ranks tell each other after an epoch.
inline std::uint32_t tag_after(std::uint32_t epoch, std::uint32_t phase) {
  return tag_of(epoch, 0, kMaxBuckets, phase);
}

}  // namespace paceline::internode
