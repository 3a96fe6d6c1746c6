#include "launch/omp_threads.h"

#include <algorithm>
#include <cstdlib>
#include <string>

namespace paceline::launch {

std::optional<int> choose_omp_threads(JobSpec& spec, int cores) {
  const char* const chosen = std::getenv("OMP_NUM_THREADS");
  if (chosen != nullptr && *chosen != '\0') return std::nullopt;
  int share = std::max(1, cores / spec.processes);
  for (const auto& own : spec.cpus) share = std::min(share, static_cast<int>(own.size()));
  const auto variable = spec.environment.emplace("OMP_NUM_THREADS", std::to_string(share)).first;
  return std::stoi(variable->second);
}

}  // namespace paceline::launch
