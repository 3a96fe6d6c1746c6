#pragma once

#include <atomic>

#include "shm/memory/region_memory.h"

namespace paceline::shm {

// Publishes whether one thread of a rank uses its group, or several. Ranks that wait for each other
// in different calls wait for ever only if no other thread can make a call.
//
// Call note_this_thread() before issuing a call; if another thread issues it, note_other_thread().
class CallingThreads {
 public:
  CallingThreads(RegionMemory& memory, int rank) : memory_(memory), rank_(rank) {}

  void note_this_thread() {
    static thread_local const char here = 0;
    const void* first = first_.load(std::memory_order_relaxed);
    if (first == &here) return;
    if (first == nullptr && first_.compare_exchange_strong(first, &here)) return;
    note_other_thread();
  }
  void note_other_thread() { several(rank_).store(1, std::memory_order_release); }
  // Whether one thread of `rank`, which may be a peer, has made all calls so far.
  bool is_one(int rank) const { return several(rank).load(std::memory_order_acquire) == 0; }

 private:
  Word& several(int rank) const { return memory_.collectives(rank).threads; }

  RegionMemory& memory_;
  int rank_;
  std::atomic<const void*> first_ = nullptr;
};

}  // namespace paceline::shm
