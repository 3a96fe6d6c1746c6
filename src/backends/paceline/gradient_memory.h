#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "shm/region.h"

namespace paceline::backends {

// Allocates large gradients in a group's shared memory.
//
// LibTorch has one allocator for all memory of the CPU. The first GradientMemory with a size sets
// ours. It serves blocks of exactly one of the sizes, requested within a backward, by a thread that
// called `prefer`; it forwards everything else to the allocator that was set before. LibTorch
// cannot remove an allocator. If the program sets another one later, or if there is no room,
// gradients are allocated elsewhere.
//
// A size does not distinguish a gradient from other tensors of a backward, which are short-lived.
// So at most eight blocks of a size exist beyond the number of its gradients.
//
// Blocks keep the region alive, but not the GradientMemory. A forked child gets no new blocks.
class GradientMemory {
 public:
  // The bytes of each gradient.
  GradientMemory(std::shared_ptr<shm::Region> region, const std::vector<std::size_t>& sizes);
  GradientMemory(const GradientMemory&) = delete;
  GradientMemory& operator=(const GradientMemory&) = delete;
  ~GradientMemory();

  // The calling thread's backwards allocate here first, then in what the thread preferred before.
  void prefer();

  class Source;

 private:
  std::shared_ptr<Source> source_;  // none without sizes
};

}  // namespace paceline::backends
