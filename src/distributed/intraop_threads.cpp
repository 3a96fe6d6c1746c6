#include "distributed/intraop_threads.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "base/cores.h"
#include "base/log.h"

namespace paceline::distributed {

void limit_intraop_threads(const base::Environment& environment, const Topology& topology,
                           int rank) {
  if (!environment.numbered_by_launched || environment.sets_threads) return;
  const int node = topology.node_of(rank);
  int cores = topology.cores_of(node);
  if (const int quota = base::core_quota(); quota > 0) cores = std::min(cores, quota);
  if (cores == 0 || topology.has_cores_apart(node)) return;
  // Not all processes of this machine need to be in this world.
  const int ranks = std::max(topology.local_size(node), environment.local_world_size.value_or(0));
  const int threads = std::max(1, cores / ranks);
  if (threads >= at::get_num_threads()) return;
  base::log(LogLevel::info,
            "rank {} uses {} of {} threads: {} ranks share {} cores here (set "
            "OMP_NUM_THREADS for another number)",
            rank, threads, at::get_num_threads(), ranks, cores);
  at::set_num_threads(threads);
}

}  // namespace paceline::distributed
