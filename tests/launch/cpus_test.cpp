#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>

#include <paceline/error.h>

#include "launch/core_binding.h"
#include "launch/cpus.h"
#include "launch/held_cpus.h"
#include "support/temporary_directory.h"

namespace paceline::launch {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::StartsWith;

using Assigned = std::vector<std::vector<int>>;

struct Machine {
  int packages = 1;
  int cores = 4;    // of each package
  int threads = 1;  // of each core
};

// Numbered as Linux does on most machines: the first threads of all cores, then the second ones.
std::vector<Cpu> cpus_of(const Machine& machine) {
  std::vector<Cpu> cpus;
  const int cores = machine.packages * machine.cores;
  for (int number = 0; number < cores * machine.threads; ++number) {
    const int core = number % cores;
    const int package = core / machine.cores;
    cpus.push_back({.number = number, .package = package, .node = package, .core = core});
  }
  return cpus;
}

TEST(AssignCpus, GivesEachRankAdjacentCores) {
  EXPECT_EQ(assign_cpus(cpus_of({.cores = 4}), 4), (Assigned{{0}, {1}, {2}, {3}}));
  EXPECT_EQ(assign_cpus(cpus_of({.cores = 4}), 2), (Assigned{{0, 1}, {2, 3}}));
  EXPECT_EQ(assign_cpus(cpus_of({.cores = 4}), 1), (Assigned{{0, 1, 2, 3}}));
}

TEST(AssignCpus, LeavesTheRemainder) {
  EXPECT_EQ(assign_cpus(cpus_of({.cores = 4}), 3), (Assigned{{0}, {1}, {2}}));
  EXPECT_EQ(assign_cpus(cpus_of({.cores = 8}), 3), (Assigned{{0, 1}, {2, 3}, {4, 5}}));
}

TEST(AssignCpus, IsEmptyIfRanksOutnumberCpus) {
  EXPECT_THAT(assign_cpus(cpus_of({.cores = 4}), 5), IsEmpty());
  EXPECT_THAT(assign_cpus({}, 1), IsEmpty());
}

TEST(AssignCpus, GivesWholePhysicalCoresWhileThereAreEnough) {
  const auto cpus = cpus_of({.cores = 4, .threads = 2});  // 0 and 4 are one core
  EXPECT_EQ(assign_cpus(cpus, 4), (Assigned{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
  EXPECT_EQ(assign_cpus(cpus, 2), (Assigned{{0, 1, 4, 5}, {2, 3, 6, 7}}));
  EXPECT_EQ(assign_cpus(cpus, 3), (Assigned{{0, 4}, {1, 5}, {2, 6}}));
}

TEST(AssignCpus, SharesPhysicalCoresOnlyWhenNoneIsFree) {
  const auto cpus = cpus_of({.cores = 4, .threads = 2});
  EXPECT_EQ(assign_cpus(cpus, 5), (Assigned{{0}, {1}, {2}, {3}, {4}}));
  EXPECT_EQ(assign_cpus(cpus, 8), (Assigned{{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}}));
}

TEST(AssignCpus, NeedsNoCertainNumbering) {
  // Hyper-threads side by side, as on some machines: 0 and 1 are one core.
  std::vector<Cpu> cpus;
  for (const int number : {7, 2, 5, 0, 3, 6, 1, 4}) cpus.push_back({number, 0, 0, number / 2 * 2});
  EXPECT_EQ(assign_cpus(cpus, 4), (Assigned{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
  EXPECT_EQ(assign_cpus(cpus, 5), (Assigned{{0}, {2}, {4}, {6}, {1}}));
}

TEST(AssignCpus, KeepsARankOnOnePackageWherePossible) {
  const auto cpus = cpus_of({.packages = 2, .cores = 5});
  EXPECT_EQ(assign_cpus(cpus, 4), (Assigned{{0, 1}, {2, 3}, {5, 6}, {7, 8}}));
  EXPECT_EQ(assign_cpus(cpus, 2), (Assigned{{0, 1, 2, 3, 4}, {5, 6, 7, 8, 9}}));
  // The last rank takes what the packages have left.
  EXPECT_EQ(assign_cpus(cpus, 5), (Assigned{{0, 1}, {2, 3}, {5, 6}, {7, 8}, {4, 9}}));
}

TEST(AssignCpus, KeepsARankOnOneNodeOfAPackage) {
  std::vector<Cpu> cpus;
  for (int number = 0; number < 6; ++number) cpus.push_back({number, 0, number % 2, number});
  EXPECT_EQ(assign_cpus(cpus, 2), (Assigned{{0, 2, 4}, {1, 3, 5}}));
}

TEST(AssignCpus, GivesAllRanksTheSameNumber) {
  // Only one thread of core 1 may be used.
  const std::vector<Cpu> cpus{{0, 0, 0, 0}, {1, 0, 0, 1}, {2, 0, 0, 0}};
  EXPECT_EQ(assign_cpus(cpus, 2), (Assigned{{0}, {1}}));
}

// Two packages of two nodes with two caches each; four cores share a cache. The second threads of
// the cores have the numbers from 32 on.
std::vector<Cpu> large_machine() {
  std::vector<Cpu> cpus;
  for (int number = 0; number < 64; ++number) {
    const int core = number % 32;
    cpus.push_back({number, core / 16, core / 8, core, core / 4 * 4});
  }
  return cpus;
}

// The CPUs of `size` cores from `first` on.
std::vector<int> cores_of_large(int first, int size) {
  std::vector<int> cpus;
  for (const int thread : {0, 32}) {
    for (int core = first; core < first + size; ++core) cpus.push_back(core + thread);
  }
  return cpus;
}

TEST(BindToNuma, DealsTheDomainsOutEvenly) {
  const auto cpus = large_machine();
  const auto nodes = bind_to_numa(cpus, 8, NumaBinding::node);
  EXPECT_EQ(nodes.domains, 4);
  ASSERT_EQ(nodes.cpus.size(), 8U);
  for (int rank = 0; rank < 8; ++rank) {
    EXPECT_EQ(nodes.cpus[static_cast<std::size_t>(rank)], cores_of_large(rank / 2 * 8, 8)) << rank;
  }
  const auto sockets = bind_to_numa(cpus, 3, NumaBinding::socket);
  EXPECT_EQ(sockets.domains, 2);
  EXPECT_EQ(sockets.cpus,
            (Assigned{cores_of_large(0, 16), cores_of_large(0, 16), cores_of_large(16, 16)}));
  const auto caches = bind_to_numa(cpus, 8, NumaBinding::core_complex);
  EXPECT_EQ(caches.domains, 8);
  for (int rank = 0; rank < 8; ++rank) {
    EXPECT_EQ(caches.cpus[static_cast<std::size_t>(rank)], cores_of_large(rank * 4, 4)) << rank;
  }
}

TEST(BindToNuma, SpreadsFewRanksOverTheMachine) {
  EXPECT_EQ(bind_to_numa(large_machine(), 2, NumaBinding::node).cpus,
            (Assigned{cores_of_large(0, 8), cores_of_large(16, 8)}));
  EXPECT_EQ(bind_to_numa(large_machine(), 1, NumaBinding::socket).cpus,
            (Assigned{cores_of_large(0, 16)}));
}

TEST(BindToNuma, ExclusiveCoresAreDividedAsTorchrunDoes) {
  // A node's first ranks get a core more where they do not divide evenly.
  EXPECT_EQ(
      bind_to_numa(cpus_of({.packages = 2, .cores = 5, .threads = 2}), 4, NumaBinding::exclusive)
          .cpus,
      (Assigned{{0, 1, 2, 10, 11, 12}, {3, 4, 13, 14}, {5, 6, 7, 15, 16, 17}, {8, 9, 18, 19}}));
  EXPECT_EQ(bind_to_numa(cpus_of({.packages = 2, .cores = 2}), 3, NumaBinding::exclusive).cpus,
            (Assigned{{0}, {1}, {2, 3}}));
}

TEST(BindToNuma, NeedsACoreForEachExclusiveRank) {
  try {
    bind_to_numa(cpus_of({.packages = 2, .cores = 1, .threads = 2}), 3, NumaBinding::exclusive);
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), StartsWith("NUMA node 0 has 1 physical core for 2 ranks"));
  }
  EXPECT_EQ(bind_to_numa(cpus_of({.cores = 1}), 3, NumaBinding::node).cpus,
            (Assigned{{0}, {0}, {0}}));
  EXPECT_THROW(bind_to_numa({}, 1, NumaBinding::node), UsageError);
}

TEST(BindToNuma, TakesANodeWithoutDescribedCachesForOneCache) {
  const auto bound =
      bind_to_numa(cpus_of({.packages = 2, .cores = 2}), 2, NumaBinding::core_complex);
  EXPECT_EQ(bound.cpus, (Assigned{{0, 1}, {2, 3}}));
  EXPECT_EQ(bound.domains, 2);
}

class ReadCpus : public ::testing::Test {
 protected:
  void write(int cpu, const std::string& package, const std::string& siblings, int node) {
    const auto path = root_.path() / ("cpu" + std::to_string(cpu));
    std::filesystem::create_directories(path / "topology");
    std::filesystem::create_directory(path / ("node" + std::to_string(node)));
    std::ofstream(path / "topology/physical_package_id") << package << '\n';
    std::ofstream(path / "topology/thread_siblings_list") << siblings << '\n';
  }
  void write_cache(int cpu, int index, int level, const std::string& shared) {
    const auto path =
        root_.path() / ("cpu" + std::to_string(cpu)) / "cache" / ("index" + std::to_string(index));
    std::filesystem::create_directories(path);
    std::ofstream(path / "level") << level << '\n';
    std::ofstream(path / "shared_cpu_list") << shared << '\n';
  }
  test::TemporaryDirectory root_;
};

TEST_F(ReadCpus, ReadsTheCacheOfTheHighestLevel) {
  for (const int cpu : {4, 13}) {
    write(cpu, "0", std::to_string(cpu), 0);
    write_cache(cpu, 0, 1, std::to_string(cpu));
    write_cache(cpu, 3, 3, cpu == 4 ? "2-5" : "8,13");
    write_cache(cpu, 2, 2, std::to_string(cpu));
    std::ofstream(root_.path() / ("cpu" + std::to_string(cpu)) / "cache/uevent") << '\n';
  }
  EXPECT_THAT(read_cpus({4, 13}, root_.path()),
              ElementsAre(Cpu{4, 0, 0, 4, 2}, Cpu{13, 0, 0, 13, 8}));
}

TEST_F(ReadCpus, ReadsTheKernelsDirectories) {
  write(0, "0", "0,2", 0);
  write(2, "0", "0,2", 0);
  write(5, "1", "4-5", 3);
  EXPECT_THAT(read_cpus({0, 2, 5}, root_.path()),
              ElementsAre(Cpu{0, 0, 0, 0}, Cpu{2, 0, 0, 0}, Cpu{5, 1, 3, 4}));
}

TEST_F(ReadCpus, TakesWhatIsNotDescribedForACoreOfItsOwn) {
  write(1, "-1", "", 0);  // as virtual machines on Arm have it
  EXPECT_THAT(read_cpus({1, 7}, root_.path()), ElementsAre(Cpu{1, 0, 0, 1}, Cpu{7, 0, 0, 7}));
  EXPECT_THAT(read_cpus({3}, "/no/such/directory"), ElementsAre(Cpu{3, 0, 0, 3}));
}

// Numbers that no machine of today has, so that no job holds them.
TEST(HeldCpus, ArePassedOverUntilReleased) {
  auto held = HeldCpus::try_hold({70001, 70002});
  ASSERT_TRUE(held);
  EXPECT_THAT(find_free({70001, 70002, 70003}), ElementsAre(70003));
  EXPECT_FALSE(HeldCpus::try_hold({70003, 70002}));
  EXPECT_THAT(find_free({70003}), ElementsAre(70003));  // released again
  held.reset();
  EXPECT_THAT(find_free({70001, 70002}), ElementsAre(70001, 70002));
}

TEST(BindToCores, ChoosesAmongTheCoresThatNoOtherJobHolds) {
  const std::vector<int> available{70011, 70012, 70013, 70014};
  const auto first = bind_to_cores({70011, 70012}, 2);
  ASSERT_TRUE(first);
  EXPECT_THAT(first->cpus, ElementsAre(ElementsAre(70011), ElementsAre(70012)));
  const auto second = bind_to_cores(available, 2);
  ASSERT_TRUE(second);
  EXPECT_THAT(second->cpus, ElementsAre(ElementsAre(70013), ElementsAre(70014)));
  EXPECT_FALSE(bind_to_cores(available, 1));
}

}  // namespace
}  // namespace paceline::launch
