#pragma once

#include <string>

#include "base/environment.h"
#include "distributed/topology.h"

namespace paceline::distributed {

// If variables number this process (RANK, or those of another launcher), no launcher has given each
// rank cores of its own, and OMP_NUM_THREADS and MKL_NUM_THREADS are unset: gives this rank its
// share of the cores of its node as LibTorch's threads, if it has more. Does nothing in worlds of
// one rank, whose cores may be its own. `paceline run` does the same before a process starts.
// Threads that outnumber the cores wait for each other in each operator.
void limit_intraop_threads(const base::Environment& environment, const Topology& topology,
                           int rank);

// "2 threads and AVX2", of at::get_num_threads and at::get_cpu_capability.
std::string describe_computing(int threads, const std::string& cpu_capability);

// While it lives, LibTorch's operations on the calling thread use this many threads. Other threads
// keep their number. at::set_num_threads does not serve: it also changes the default of later
// threads.
class IntraopThreads {
 public:
  explicit IntraopThreads(int threads);
  IntraopThreads(const IntraopThreads&) = delete;
  IntraopThreads& operator=(const IntraopThreads&) = delete;
  ~IntraopThreads();

 private:
  int before_;
  int mkl_before_ = 0;
};

}  // namespace paceline::distributed
