#include "measure/pinned_thread.h"

#include <vector>

#include "base/cores.h"

namespace paceline::bench {

PinnedThread::PinnedThread(int rank, int ranks) {
  CPU_ZERO(&before_);
  const std::vector<int> cores = base::affinity();
  if (ranks > static_cast<int>(cores.size())) return;
  for (const int core : cores) CPU_SET(core, &before_);
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(cores[static_cast<std::size_t>(rank)], &one);
  ::sched_setaffinity(0, sizeof(one), &one);
}

PinnedThread::~PinnedThread() {
  if (CPU_COUNT(&before_) > 0) ::sched_setaffinity(0, sizeof(before_), &before_);
}

}  // namespace paceline::bench
