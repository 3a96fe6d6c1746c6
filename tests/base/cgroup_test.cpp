#include "base/cgroup.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "support/temporary_directory.h"

namespace paceline::base {
namespace {

class FindCgroup : public ::testing::Test {
 protected:
  Cgroup find(std::string_view controller, const std::string& membership) const {
    const auto file = directory_.path() / "cgroup";
    std::ofstream(file) << membership;
    return find_cgroup(controller, file, "/cg");
  }
  const test::TemporaryDirectory directory_;
};

TEST_F(FindCgroup, ReadsTheOnePathOfVersionTwo) {
  const Cgroup found = find("memory", "0::/user.slice/job 7\n");
  EXPECT_EQ(found.root, "/cg");
  EXPECT_EQ(found.group, "/cg/user.slice/job 7");
}

TEST_F(FindCgroup, ReadsTheControllersHierarchyOfVersionOne) {
  const std::string both = "5:memory:/m\n4:cpu,cpuacct:/a/b\n3:cpuset:/s\n0::/unified\n";
  EXPECT_EQ(find("cpu", both).root, "/cg/cpu");
  EXPECT_EQ(find("cpu", both).group, "/cg/cpu/a/b");
  EXPECT_EQ(find("memory", both).group, "/cg/memory/m");
  EXPECT_EQ(find("pids", both).group, "/cg/unified");
}

TEST_F(FindCgroup, IsTheRootWithoutAMembership) {
  EXPECT_EQ(find("cpu", "").group, "/cg");
  EXPECT_EQ(find("cpu", "nonsense\n").group, "/cg");
  EXPECT_EQ(find_cgroup("cpu", directory_.path() / "missing", "/cg").group, "/cg");
}

TEST(CgroupIdentity, IsThatOfTheProcessesInOneContainer) {
  const std::string own = cpu_cgroup_identity();
  EXPECT_THAT(own, ::testing::StartsWith("cgroup:["));
  EXPECT_EQ(cpu_cgroup_identity(), own);
  constexpr int kSame = 1;
  constexpr int kNotAllowed = 2;
  const pid_t child = ::fork();
  if (child == 0) {
    if (::unshare(CLONE_NEWCGROUP) != 0) ::_exit(kNotAllowed);
    ::_exit(cpu_cgroup_identity() == own ? kSame : 0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  if (WEXITSTATUS(status) == kNotAllowed) GTEST_SKIP() << "needs the rights of root";
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace paceline::base
