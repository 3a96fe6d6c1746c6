#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "shm/region.h"

namespace paceline::backends {

// Where autograd allocates large gradients, so that they lie in a group's shared memory from birth.
//
// LibTorch asks one allocator for all memory of the CPU. From the first GradientMemory with a size
// on, that is one of ours, which asks the one that was set before for everything but this: a block
// of just one of the sizes, wanted inside a backward, by a thread that called `prefer`. An
// allocator cannot be taken out again, and one that the program sets later takes its place; then,
// as when there is no room, gradients are born elsewhere.
//
// A size alone does not tell a gradient from other tensors of a backward. Those come and go; but at
// most eight blocks of a size more than there are gradients of it exist at a time.
//
// Blocks keep the region alive, not the GradientMemory. In a forked child there are no new ones.
class GradientMemory {
 public:
  // The bytes of each gradient.
  GradientMemory(std::shared_ptr<shm::Region> region, const std::vector<std::size_t>& sizes);
  GradientMemory(const GradientMemory&) = delete;
  GradientMemory& operator=(const GradientMemory&) = delete;
  ~GradientMemory();

  // The calling thread's backwards take from this first, then from those it preferred before.
  void prefer();

  class Source;

 private:
  std::shared_ptr<Source> source_;  // none without sizes
};

}  // namespace paceline::backends
