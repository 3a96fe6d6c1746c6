#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <random>

#include "shm/memory/arena.h"

namespace paceline::shm {
namespace {

TEST(Arena, AlignsAndReuses) {
  Arena arena(4096, 1024);
  const auto first = arena.allocate(1);
  const auto second = arena.allocate(65);
  ASSERT_TRUE(first && second);
  EXPECT_EQ(*first, 4096u);
  EXPECT_EQ(*second, 4096u + 64);
  EXPECT_EQ(arena.bytes_in_use(), 64u + 128);
  arena.free(*first);
  EXPECT_EQ(arena.allocate(10), first);
}

TEST(Arena, GivesWholePages) {
  Arena arena(64, 4 * kPage);
  const auto small = arena.allocate(1);
  const auto pages = arena.allocate(kPage + 1, kPage);
  ASSERT_TRUE(small && pages);
  EXPECT_EQ(*pages, kPage);
  EXPECT_EQ(arena.bytes_in_use(), 64 + 2 * kPage);
  EXPECT_EQ(arena.allocate(64), 128u);  // before the pages
  EXPECT_EQ(arena.allocate(64 + kPage), 3 * kPage);
  EXPECT_FALSE(arena.allocate(1, kPage));
  arena.free(*pages);
  EXPECT_TRUE(arena.allocate(2 * kPage, kPage));
}

TEST(Arena, ReturnsNullIfFullOrTheSizeIsImpossible) {
  Arena arena(0, 1024);
  EXPECT_FALSE(arena.allocate(1025));
  EXPECT_FALSE(arena.allocate(SIZE_MAX));
  EXPECT_TRUE(arena.allocate(1024));
  EXPECT_FALSE(arena.allocate(1));
  EXPECT_FALSE(Arena(64, 0).allocate(1));
}

TEST(Arena, NeverReusesRetiredMemory) {
  Arena arena(0, 128);
  const auto block = arena.allocate(64);
  arena.retire(*block);
  arena.free(*block);
  EXPECT_EQ(arena.bytes_in_use(), 0u);
  EXPECT_EQ(arena.allocate(64), 64u);
  EXPECT_FALSE(arena.allocate(1));
}

TEST(Arena, RandomBlocksNeverOverlapAndMergeWhenFreed) {
  Arena arena(0, 1 << 20);
  std::mt19937 random(5);
  std::map<std::size_t, std::size_t> live;
  for (int i = 0; i < 20000; ++i) {
    if (!live.empty() && random() % 2 == 0) {
      auto victim = std::next(live.begin(), static_cast<long>(random() % live.size()));
      arena.free(victim->first);
      live.erase(victim);
    } else {
      const std::size_t bytes = random() % 20000;
      const auto offset = arena.allocate(bytes);
      if (!offset) continue;
      const auto next = live.lower_bound(*offset);
      ASSERT_TRUE(next == live.end() || *offset + bytes <= next->first);
      ASSERT_TRUE(next == live.begin() ||
                  std::prev(next)->first + std::prev(next)->second <= *offset);
      live.emplace(*offset, bytes);
    }
  }
  for (const auto& [offset, bytes] : live) arena.free(offset);
  EXPECT_EQ(arena.bytes_in_use(), 0u);
  EXPECT_TRUE(arena.allocate(1 << 20));
}

}  // namespace
}  // namespace paceline::shm
