#include "shm/sync/joint_cores.h"

#include <gtest/gtest.h>
#include <sched.h>

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
  cores.add({4, 5, 64, 1023}, 0);
  EXPECT_EQ(cores.count(), 4);
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

std::shared_ptr<Region> enter_on(int core, int rank, std::shared_ptr<Mapping> mapping) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  std::shared_ptr<Region> region;
  std::thread([&] {
    EXPECT_EQ(::sched_setaffinity(0, sizeof(set), &set), 0);
    Membership unwatched;
    unwatched.peers.resize(2);
    region = std::make_shared<Region>(mapping, std::move(unwatched), rank, 2, test::small_region());
  }).join();
  return region;
}

std::shared_ptr<Mapping> memory_of_two() {
  const std::size_t bytes = Region::layout(2, test::small_region()).total();
  return std::make_shared<Mapping>(Mapping::create_memory(bytes), bytes);
}

TEST(Region, IsNotOversubscribedByRanksBoundToACoreEach) {
  const std::vector<int> cores = base::affinity();
  if (cores.size() < 2 || base::core_quota() == 1) GTEST_SKIP() << "needs 2 cores";
  const auto apart = memory_of_two();
  const auto rank0 = enter_on(cores[0], 0, apart);
  const auto rank1 = enter_on(cores[1], 1, apart);
  EXPECT_FALSE(rank0->oversubscribed());
  EXPECT_FALSE(rank1->oversubscribed());
}

TEST(Region, IsOversubscribedByRanksBoundToOneCore) {
  const int core = base::affinity().front();
  const auto together = memory_of_two();
  const auto rank0 = enter_on(core, 0, together);
  const auto rank1 = enter_on(core, 1, together);
  EXPECT_TRUE(rank0->oversubscribed());
  EXPECT_TRUE(rank1->oversubscribed());
}

}  // namespace
}  // namespace paceline::shm
