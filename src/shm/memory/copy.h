#pragma once

#include <cstddef>
#include <cstring>

namespace paceline::shm {

// `target` may be `source`; otherwise they do not overlap.
inline void copy_bytes(void* target, const void* source, std::size_t bytes) {
  if (bytes > 0 && target != source) std::memcpy(target, source, bytes);
}

// The same with non-temporal stores: the target's lines are not read first, and displace no others.
// The stores are ordered before the next release, as any other store.
void stream_bytes(void* target, const void* source, std::size_t bytes);

// How to write the results of a call whose tensors take `bytes` on all ranks together: past the
// cache if they do not fit into it, since it would have evicted them before they are read.
using Copy = void (*)(void*, const void*, std::size_t);
Copy copy_of_results(std::size_t bytes);

// Call after the only rank that reads these staged bytes has read them: stores into each of their
// lines. Then the cache of this core owns them, and the writer's next store gets them in one
// transfer. Lines that this core has only read remain in both caches, and storing into those takes
// 4 to 15 times as long (AMD EPYC). Whole lines, of a rank's own staging area, whose content is no
// longer needed.
void take_lines(std::byte* begin, std::size_t bytes);

// Null stays null: ranks that neither give nor get a tensor have no memory for it.
inline const std::byte* advance(const void* pointer, std::size_t bytes) {
  return pointer == nullptr ? nullptr : static_cast<const std::byte*>(pointer) + bytes;
}
inline std::byte* advance(void* pointer, std::size_t bytes) {
  return pointer == nullptr ? nullptr : static_cast<std::byte*>(pointer) + bytes;
}

}  // namespace paceline::shm
