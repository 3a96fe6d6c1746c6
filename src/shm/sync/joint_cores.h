#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "base/cores.h"
#include "shm/sync/cache_line.h"

namespace paceline::shm {

// The cores that the ranks of a group may use together, in shared memory that is zero at first.
// A rank's own affinity does not tell: if each rank is bound to a core, each sees one core.
class JointCores {
 public:
  // Called once by each rank, before it publishes anything, with its affinity mask (empty if
  // unknown) and its cgroup's quota in cores (0: none).
  void add(const std::vector<int>& affinity, int quota);

  // The cores of all ranks that have called add, at most their quota. The same for all ranks once
  // each has published something.
  int count() const { return count_.load(std::memory_order_relaxed); }

 private:
  static constexpr std::size_t kBits = 64;
  static constexpr std::size_t kCores = 8 * sizeof(base::CpuSet);

  std::array<std::atomic<std::uint64_t>, kCores / kBits> mask_;
  // On a line of its own: slow waits and small reductions read it.
  alignas(kCacheLine) std::atomic<int> count_;
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free &&
                std::atomic<int>::is_always_lock_free);
};

}  // namespace paceline::shm
