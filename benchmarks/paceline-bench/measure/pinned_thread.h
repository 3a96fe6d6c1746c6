#pragma once

#include <sched.h>

namespace paceline::bench {

// While it lives, the calling thread runs on one core, the one at index `rank` of its affinity
// mask. So the ranks of all implementations run on the same cores. Threads that backends have
// started remain free. Does nothing if `ranks` outnumber the cores.
class PinnedThread {
 public:
  PinnedThread(int rank, int ranks);
  PinnedThread(const PinnedThread&) = delete;
  PinnedThread& operator=(const PinnedThread&) = delete;
  ~PinnedThread();

 private:
  cpu_set_t before_;
};

}  // namespace paceline::bench
