#include "base/malloc_thresholds.h"

#include <malloc.h>

#include <cstdlib>
#include <limits>

#include <paceline/tune_malloc.h>

namespace paceline {
namespace {

// In bytes. malloc maps blocks of at least the first size, and unmaps them when they are freed. It
// returns free memory at the end of the heap to the system beyond the second size.
constexpr int kMmapThreshold = 1 << 30;
constexpr int kTrimThreshold = std::numeric_limits<int>::max();

}  // namespace

bool tune_malloc() {
#ifdef __GLIBC__
  return mallopt(M_MMAP_THRESHOLD, kMmapThreshold) == 1 &&
         mallopt(M_TRIM_THRESHOLD, kTrimThreshold) == 1;
#else
  return false;
#endif
}

namespace base {

std::map<std::string, std::string> malloc_variables() {
  constexpr const char* kMmap = "MALLOC_MMAP_THRESHOLD_";
  constexpr const char* kTrim = "MALLOC_TRIM_THRESHOLD_";
  for (const char* name : {kMmap, kTrim, "GLIBC_TUNABLES"}) {
    if (std::getenv(name) != nullptr) return {};
  }
  return {{kMmap, std::to_string(kMmapThreshold)}, {kTrim, std::to_string(kTrimThreshold)}};
}

}  // namespace base
}  // namespace paceline
