#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "base/cores.h"
#include "shm/memory/copy.h"

namespace paceline::shm {
namespace {

// Guards around the target show a byte too many.
TEST(StreamBytes, CopiesExactlyTheGivenBytes) {
  constexpr std::size_t kGuard = 64;
  std::vector<unsigned char> source(600);
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<unsigned char>(i % 251);
  for (std::size_t to = 0; to < 64; to += 5) {
    for (const std::size_t from : {0u, 1u, 32u}) {
      for (const std::size_t bytes : {0u, 1u, 63u, 64u, 65u, 127u, 128u, 200u, 511u}) {
        std::vector<unsigned char> target(kGuard + to + bytes + kGuard, 255);
        std::vector<unsigned char> expected = target;
        std::copy_n(source.data() + from, bytes, expected.data() + kGuard + to);
        stream_bytes(target.data() + kGuard + to, source.data() + from, bytes);
        ASSERT_EQ(target, expected) << bytes << " bytes from " << from << " to " << to;
      }
    }
  }
}

TEST(CopyOfResults, BypassesTheCacheOnlyForResultsLargerThanIt) {
  EXPECT_EQ(copy_of_results(1000), &copy_bytes);
  const bool known = base::last_level_cache() > 0;
  EXPECT_EQ(copy_of_results(std::size_t{1} << 40), known ? &stream_bytes : &copy_bytes);
}

}  // namespace
}  // namespace paceline::shm
