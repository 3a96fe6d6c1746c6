#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "shm/collectives/fingerprint.h"
#include "shm/sync/cache_line.h"
#include "shm/sync/futex.h"

namespace paceline::shm {

// What a rank publishes for its collective calls. Zero-initialised shared memory; each rank writes
// its own and reads the others'.

// One cache line that a rank writes and all others read.
struct alignas(kCacheLine) Slot {
  Word round;
  CollectiveFingerprint call;
};
static_assert(sizeof(Slot) == kCacheLine);

// Which monitored barriers a rank has reached, by number.
struct BarrierArrival {
  Word arrived;
  // Only rank 0 writes these, `over` last:
  Word over;                               // the last that rank 0 has ended
  Word complete;                           // the last that all ranks have passed
  std::atomic<LocalRankMask> missing = 0;  // the ranks that did not, in the last that failed
};

// A reader reads what is published for a round before its own next round, and the writer writes
// again two rounds later. So two of each suffice, used in turn.
struct CollectiveControl {
  alignas(kCacheLine) std::array<Slot, 2> slots;
  // If the group is a node's part of a group on several nodes: that one's last call, as of the
  // slots' rounds.
  alignas(kCacheLine) std::array<CollectiveFingerprint, 2> outer_calls;
  alignas(kCacheLine) std::array<Splits, 2> splits;
  alignas(kCacheLine) BarrierArrival barrier;
  alignas(kCacheLine) Word threads;  // 1 once more than one thread has made calls
};

}  // namespace paceline::shm
