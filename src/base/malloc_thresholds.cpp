#include "base/malloc_thresholds.h"

#include <malloc.h>

#include <cstdlib>
#include <limits>

#include <paceline/tune_malloc.h>

namespace paceline {
namespace {

// In bytes. Blocks from the first on are mapped, and given back when they are freed; of the others,
// what lies free at the end of the heap beyond the second is.
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
