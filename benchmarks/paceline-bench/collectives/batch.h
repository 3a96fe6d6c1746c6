#pragma once

#include <algorithm>
#include <cstdint>

namespace paceline::bench {

// Small tensors are reduced a batch at a time, each call on memory written since the last one: the
// clock and the start together cost as much as one call.
inline int calls_of(std::int64_t bytes) {
  constexpr std::int64_t kBatchBytes = std::int64_t{64} << 10;
  constexpr std::int64_t kMaxCalls = 64;
  return static_cast<int>(std::clamp(kBatchBytes / bytes, std::int64_t{1}, kMaxCalls));
}

}  // namespace paceline::bench
