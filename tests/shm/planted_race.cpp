// Two ranks touch one byte of a staging buffer with no step between. ThreadSanitizer must report
// it; if it does not, it is blind to races in the region, and the other tests under it prove
// nothing.

#include <cstddef>

#include "support/thread_ranks.h"

int main() {
  paceline::test::run_thread_ranks(2, [](auto region) {
    std::byte& shared = *region->memory().staging(0, 0);
    shared = static_cast<std::byte>(std::to_integer<int>(shared) + region->rank());
  });
  return 0;
}
