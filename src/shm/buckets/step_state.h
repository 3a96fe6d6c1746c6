#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "shm/buckets/control_blocks.h"

namespace paceline::shm {

// Where a rank is in the step of a bucket reducer, as the shared memory shows it.
struct StepState {
  int rank;                     // global
  std::size_t ready = 0;        // buckets
  std::size_t reduced = 0;      // buckets whose slice of this rank is
  std::size_t last = 0;         // the bucket that was ready last, if any is
  const char* phase = nullptr;  // "forward", "backward", "waits", "finished", "aborted"
};

// By rank. Never waits, and may be called from any thread.
std::vector<StepState> read_step_states(const ControlBlocks& blocks);

}  // namespace paceline::shm
