#include "distributed/intraop_threads.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>

#include "base/cores.h"
#include "base/log.h"

// Null if LibTorch was built without OpenMP, or without MKL. MKL's returns the number before, and 0
// stands for its default.
extern "C" [[gnu::weak]] void omp_set_num_threads(int);
extern "C" [[gnu::weak]] int MKL_Set_Num_Threads_Local(int);

namespace paceline::distributed {

void limit_intraop_threads(const base::Environment& environment, const Topology& topology,
                           int rank) {
  if (!environment.rank || environment.sets_threads) return;
  const int node = topology.node_of(rank);
  const int cores = topology.cores_of(node);
  if (cores == 0 || topology.has_cores_apart(node)) return;
  // Not all processes of this machine need to be in this world.
  const int ranks = std::max(topology.local_size(node), environment.local_world_size.value_or(0));
  int threads = std::max(1, cores / ranks);
  if (const int quota = base::core_quota(); quota > 0) {
    // Containers that share a machine have a quota each.
    const int neighbours = topology.in_cgroup_of(rank);
    const int sharing = neighbours == topology.local_size(node) ? ranks : neighbours;
    threads = std::min(threads, std::max(1, quota / sharing));
  }
  if (threads >= at::get_num_threads()) return;
  base::log(LogLevel::info,
            "rank {} uses {} of {} threads: {} ranks share {} cores here (set "
            "OMP_NUM_THREADS for another number)",
            rank, threads, at::get_num_threads(), ranks, cores);
  at::set_num_threads(threads);
}

std::string describe_computing(int threads, const std::string& cpu_capability) {
  return fmt::format("{} thread{} and {}", threads, threads == 1 ? "" : "s", cpu_capability);
}

// at::get_num_threads comes first: otherwise PyTorch sets OpenMP's number itself, at this thread's
// first operation.
IntraopThreads::IntraopThreads(int threads) : before_(at::get_num_threads()) {
  if (omp_set_num_threads != nullptr) omp_set_num_threads(threads);
  if (MKL_Set_Num_Threads_Local != nullptr) mkl_before_ = MKL_Set_Num_Threads_Local(threads);
}

IntraopThreads::~IntraopThreads() {
  if (omp_set_num_threads != nullptr) omp_set_num_threads(before_);
  if (MKL_Set_Num_Threads_Local != nullptr) MKL_Set_Num_Threads_Local(mkl_before_);
}

}  // namespace paceline::distributed
