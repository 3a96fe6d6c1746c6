#include "facts/cores.h"

#include <unistd.h>

#include <cstdlib>

#include "base/cores.h"

namespace paceline::doctor {

CoreFacts read_cores() {
  CoreFacts facts;
  facts.online = static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
  facts.affinity = base::affinity();
  facts.quota = base::core_quota();
  facts.cpus = launch::read_cpus(facts.affinity);
  facts.available = base::available_cores();
  if (const char* const threads = std::getenv("OMP_NUM_THREADS")) facts.omp_num_threads = threads;
  return facts;
}

}  // namespace paceline::doctor
