#pragma once

#include "shm/sync/futex.h"
#include "shm/sync/wait_ladder.h"

namespace paceline::shm {

// For waits that any of several peers may end. Lives in zero-initialised shared memory: any rank
// rings, the owner's threads listen.
//
// A waiting thread reads rings(), checks its condition, and only then listens. So it misses no ring
// in between.
struct Doorbell {
  Word count;      // how often it was rung
  Word listeners;  // how many of the owner's threads sleep in the kernel

  void ring();
  std::uint32_t rings() const { return count.load(std::memory_order_acquire); }
  // Returns once the doorbell has rung since `heard` was read, or `interrupted` returns true; may
  // return spuriously.
  template <typename Interrupted>
  void listen(std::uint32_t heard, const WaitLadder& ladder, Interrupted interrupted) {
    if (ladder.spin_or_yield([&] { return rings() != heard || interrupted(); })) return;
    sleep(heard);
  }

 private:
  void sleep(std::uint32_t heard);
};

}  // namespace paceline::shm
