#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "shm/collectives/fingerprint.h"
#include "shm/sync/cache_line.h"
#include "shm/sync/futex.h"

namespace paceline::shm {

// What a rank publishes for its collective calls. Lives in zero-initialised shared memory; a rank
// writes its own and reads the others'.

// One cache line that a rank writes and all others read.
struct alignas(kCacheLine) Slot {
  Word round;
  CollectiveFingerprint call;
};
static_assert(sizeof(Slot) == kCacheLine);

// Which monitored barriers a rank has reached, by number.
struct BarrierArrival {
  Word arrived;
  // Of rank 0, which writes the other two before `over`:
  Word over;                               // the last that it no longer waits in
  Word complete;                           // the last that all ranks have passed
  std::atomic<LocalRankMask> missing = 0;  // the ranks that did not, in the last that failed
};

// What is published for a round is read before the reader's next round, and written again two
// rounds later: so there are two of each, used in turn.
struct CollectiveControl {
  alignas(kCacheLine) std::array<Slot, 2> slots;
  alignas(kCacheLine) std::array<Splits, 2> splits;
  alignas(kCacheLine) BarrierArrival barrier;
  alignas(kCacheLine) Word threads;  // 1 once more than one thread has made calls
};

}  // namespace paceline::shm
