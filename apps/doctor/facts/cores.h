#pragma once

#include <string>
#include <vector>

#include "launch/cpus.h"

namespace paceline::doctor {

struct CoreFacts {
  int online = 0;                   // CPUs of the machine
  std::vector<int> affinity{};      // those that this process may use
  int quota = 0;                    // the control group's, in cores; 0: none
  std::vector<launch::Cpu> cpus{};  // where those of `affinity` are
  int available = 1;                // what `paceline run` counts as cores
  std::string omp_num_threads{};    // the variable
};

CoreFacts read_cores();

// What `paceline run --nproc-per-node auto` starts.
inline int auto_processes(const CoreFacts& facts) {
  return facts.available;
}

}  // namespace paceline::doctor
