#include "shm/sync/joint_cores.h"

#include <gtest/gtest.h>

#include <thread>

#include "base/cores.h"
#include "support/thread_ranks.h"

namespace paceline::shm {
namespace {

TEST(JointCores, CountsEachCoreOnce) {
  JointCores cores{};
  cores.add({5}, 0);
  EXPECT_EQ(cores.count(), 1);
  cores.add({5}, 0);
  EXPECT_EQ(cores.count(), 1);
  cores.add({4, 5, 64, 1029, 8191}, 0);
  EXPECT_EQ(cores.count(), 5);
}

TEST(JointCores, AreNoMoreThanTheQuota) {
  JointCores cores{};
  for (int core = 0; core < 4; ++core) cores.add({core}, 2);
  EXPECT_EQ(cores.count(), 2);
}

TEST(JointCores, AreAllOfTheMachineIfAnAffinityIsUnknown) {
  JointCores cores{};
  cores.add({}, 0);
  EXPECT_EQ(cores.count(), static_cast<int>(std::thread::hardware_concurrency()));
}

// The last rank to come counts the cores of all, whatever the others have seen.
TEST(JointCores, CountTheCoresOfRanksThatComeAtTheSameTime) {
  for (int round = 0; round < 200; ++round) {
    JointCores cores{};
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 4; ++rank) {
      ranks.emplace_back([&cores, rank] { cores.add({rank, 100 * rank}, 0); });
    }
    for (std::thread& rank : ranks) rank.join();
    ASSERT_EQ(cores.count(), 7);
  }
}

TEST(Region, IsNotOversubscribedByRanksBoundToACoreEach) {
  const std::vector<int> cores = base::affinity();
  if (cores.size() < 2 || base::core_quota() == 1) GTEST_SKIP() << "needs 2 cores";
  const test::ThreadRegions regions(2);
  const auto rank0 = regions.enter_on(cores[0], 0);
  const auto rank1 = regions.enter_on(cores[1], 1);
  EXPECT_FALSE(rank0->oversubscribed());
  EXPECT_FALSE(rank1->oversubscribed());
}

TEST(Region, IsOversubscribedByRanksBoundToOneCore) {
  const int core = base::affinity().front();
  const test::ThreadRegions regions(2);
  const auto rank0 = regions.enter_on(core, 0);
  const auto rank1 = regions.enter_on(core, 1);
  EXPECT_TRUE(rank0->oversubscribed());
  EXPECT_TRUE(rank1->oversubscribed());
}

}  // namespace
}  // namespace paceline::shm
