#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>

#include "launch/core_binding.h"
#include "launch/cpus.h"
#include "launch/held_cpus.h"
#include "support/temporary_directory.h"

namespace paceline::launch {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

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

class ReadCpus : public ::testing::Test {
 protected:
  void write(int cpu, const std::string& package, const std::string& siblings, int node) {
    const auto path = root_.path() / ("cpu" + std::to_string(cpu));
    std::filesystem::create_directories(path / "topology");
    std::filesystem::create_directory(path / ("node" + std::to_string(node)));
    std::ofstream(path / "topology/physical_package_id") << package << '\n';
    std::ofstream(path / "topology/thread_siblings_list") << siblings << '\n';
  }
  test::TemporaryDirectory root_;
};

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
