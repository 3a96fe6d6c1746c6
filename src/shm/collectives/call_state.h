#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shm/collectives/fingerprint.h"
#include "shm/region.h"

namespace paceline::shm {

// Where a rank is in the collective calls of a group, as the shared memory shows it.
struct CallState {
  int rank;                 // global
  std::uint64_t call = 0;   // the number of its last one, which may be over; 0: none yet
  std::string operation{};  // "all_reduce of 10 float32"; empty if the rank is publishing one
  bool waits = false;       // in this call, for a rank that is behind
};

// What the rank called in that round. The rank may be writing it: the copy is whole only if its
// rounds say so afterwards, which ThreadSanitizer does not know.
CollectiveFingerprint copy_call(const Region& region, int rank, std::uint32_t round);

// By rank. Never waits, and may be called from any thread.
std::vector<CallState> read_call_states(const Region& region);

}  // namespace paceline::shm
