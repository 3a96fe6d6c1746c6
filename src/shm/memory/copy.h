#pragma once

#include <cstddef>
#include <cstring>

namespace paceline::shm {

// `target` may be `source`; otherwise they do not overlap.
inline void copy_bytes(void* target, const void* source, std::size_t bytes) {
  if (bytes > 0 && target != source) std::memcpy(target, source, bytes);
}

// The same past the cache: the target's lines are written without being read first, and displace no
// others. What other threads see of it is ordered like any other store before the next release.
void stream_bytes(void* target, const void* source, std::size_t bytes);

// How to write the results of a call: past the cache if its tensors, `bytes` on all ranks together,
// do not fit into it, so that they would have left it by the time somebody reads them.
using Copy = void (*)(void*, const void*, std::size_t);
Copy copy_of_results(std::size_t bytes);

inline const std::byte* advance(const void* pointer, std::size_t bytes) {
  return static_cast<const std::byte*>(pointer) + bytes;
}
inline std::byte* advance(void* pointer, std::size_t bytes) {
  return static_cast<std::byte*>(pointer) + bytes;
}

}  // namespace paceline::shm
