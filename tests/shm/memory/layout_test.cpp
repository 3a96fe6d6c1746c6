#include "shm/memory/layout.h"

#include <gtest/gtest.h>

#include <cstddef>

#include <paceline/error.h>

#include "shm/memory/arena.h"

namespace paceline::shm {
namespace {

constexpr std::size_t kStaging = std::size_t{1} << 20;

TEST(Layout, DefaultArenasTakeTheirSizeFromTheMemory) {
  const Layout computed(3, kStaging, 0);
  const std::size_t smaller = computed.total() - 3 * kPage;
  const Layout adopted = computed.in(smaller);
  EXPECT_EQ(adopted.total(), smaller);
  EXPECT_EQ(adopted.agreed(), computed.agreed());
  EXPECT_EQ(adopted.arena_bytes(), computed.arena_bytes() - kPage);
  EXPECT_EQ(adopted.arena(2) + adopted.arena_bytes(), smaller);
  EXPECT_THROW(computed.in(smaller + kPage), Error);
  EXPECT_THROW(computed.in(computed.agreed() - 1), Error);
}

TEST(Layout, ArenasOfAGivenSizeKeepIt) {
  const Layout given(3, kStaging, 2 * kPage);
  EXPECT_EQ(given.agreed(), given.total());
  EXPECT_EQ(given.in(given.total()).total(), given.total());
  EXPECT_THROW(given.in(given.total() + 3 * kPage), Error);
}

}  // namespace
}  // namespace paceline::shm
