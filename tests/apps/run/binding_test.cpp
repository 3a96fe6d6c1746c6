// The real `paceline` with small shell programs as workers: --bind-to-cores.
#include <gmock/gmock.h>
#include <sched.h>

#include <csignal>
#include <cstdlib>
#include <utility>

#include "base/cores.h"
#include "launcher.h"

namespace paceline {
namespace {

using test::ChildProcess;
using test::eventually;
using test::Launcher;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kNotBound = ", not bound to cores: too few are free\n";

class BindToCores : public Launcher {
 protected:
  void SetUp() override {
    if (cores_.size() < 2) GTEST_SKIP() << "needs 2 cores";
    ::unsetenv("OMP_NUM_THREADS");  // the launcher reports it instead of its own number
    cores_.resize(2);
    auto job = start(cores_, 2, "true");
    job.wait();
    if (job.err().find("of its own") == std::string::npos) GTEST_SKIP() << job.err();
  }
  void TearDown() override {
    allow(all_);
    Launcher::TearDown();
  }

  static void allow(const std::vector<int>& cores) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int core : cores) CPU_SET(core, &set);
    ASSERT_EQ(::sched_setaffinity(0, sizeof(set), &set), 0);
  }
  // A job whose launcher may use `cores`.
  ChildProcess start(const std::vector<int>& cores, int ranks, const std::string& script,
                     std::vector<std::string> flags = {"--bind-to-cores"}) {
    allow(cores);
    return run(ranks, script, std::move(flags));
  }
  std::string core(std::size_t index) const { return std::to_string(cores_[index]); }

  const std::vector<int> all_ = base::affinity();
  std::vector<int> cores_ = all_;
};

constexpr const char* kShowCores =
    "echo cores=$(sed -n 's/^Cpus_allowed_list:.//p' /proc/$$/status)";

TEST_F(BindToCores, GivesEachRankACoreOfItsOwn) {
  auto job = start(cores_, 2, std::string(kShowCores) + " threads=$OMP_NUM_THREADS");
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(job.out(), HasSubstr("[rank0]: cores=" + core(0) + " threads=1\n"));
  EXPECT_THAT(job.out(), HasSubstr("[rank1]: cores=" + core(1) + " threads=1\n"));
  EXPECT_THAT(job.err(), HasSubstr("), each on 1 core of its own\n"));
}

TEST_F(BindToCores, NumaBindingGivesExclusiveCores) {
  auto job = start(cores_, 2, kShowCores, {"--numa_binding=exclusive"});
  const int code = job.wait();
  if (code == 2) GTEST_SKIP() << job.err();  // hyper-threads of one core, or nodes of one core
  EXPECT_EQ(code, 0) << job.err();
  EXPECT_THAT(job.out(), HasSubstr("[rank0]: cores=" + core(0) + "\n"));
  EXPECT_THAT(job.out(), HasSubstr("[rank1]: cores=" + core(1) + "\n"));
  EXPECT_THAT(job.err(), HasSubstr("), each bound to 1 core of its own on "));
}

TEST_F(BindToCores, NumaBindingKeepsToTheAllowedCores) {
  for (const auto& [mode, kind] : {std::pair{"node", " NUMA node"}, std::pair{"socket", " socket"},
                                   std::pair{"core-complex", " cache"}}) {
    auto job = start({cores_[1]}, 2, kShowCores, {"--numa-binding", mode});
    EXPECT_EQ(job.wait(), 0) << job.err();
    EXPECT_THAT(job.out(), HasSubstr("[rank0]: cores=" + core(1) + "\n"));
    EXPECT_THAT(job.out(), HasSubstr("[rank1]: cores=" + core(1) + "\n"));
    EXPECT_THAT(job.err(), HasSubstr(std::string("), each bound to the only") + kind + "\n"));
  }
}

TEST_F(BindToCores, ChangesNothingWithoutTheFlag) {
  auto job = start(cores_, 2, "exec taskset -p $$", {});
  EXPECT_EQ(job.wait(), 0) << job.err();
  const auto mask = [&](int rank) {
    const auto line = job.out().find("[rank" + std::to_string(rank) + "]: ");
    const auto begin = job.out().find("mask: ", line);
    return job.out().substr(begin, job.out().find('\n', begin) - begin);
  };
  EXPECT_EQ(mask(0), mask(1));
  EXPECT_THAT(job.err(), Not(HasSubstr("of its own")));
}

TEST_F(BindToCores, WorkersDoNotInheritTheSocketsThatHoldThem) {
  auto job = start(cores_, 1, "readlink /proc/$$/fd/*; exit 0");
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(job.out(), HasSubstr("memfd:"));
  EXPECT_THAT(job.out(), Not(HasSubstr("socket:")));
}

TEST_F(BindToCores, JobsGetDifferentCoresWhileThereAreAny) {
  auto first = start({cores_[1]}, 1, "echo up; exec sleep 1000");
  first.wait_for("up");
  auto second = start(cores_, 1, std::string(kShowCores) + "; exec sleep 1000");
  second.wait_for("cores=");
  EXPECT_THAT(second.out(), HasSubstr("cores=" + core(0) + "\n"));
  EXPECT_THAT(second.err(), HasSubstr("1 process, 1 thread each"));
  auto third = start(cores_, 1, "true");
  EXPECT_EQ(third.wait(), 0);
  EXPECT_THAT(third.err(), HasSubstr(kNotBound));
}

TEST_F(BindToCores, AJobThatGetsTooFewIsNotBound) {
  auto first = start({cores_[0]}, 1, "echo up; exec sleep 1000");
  first.wait_for("up");
  auto second = start(cores_, 2, kShowCores);
  EXPECT_EQ(second.wait(), 0);
  EXPECT_THAT(second.out(), Not(HasSubstr("cores=" + core(1) + "\n")));
  EXPECT_THAT(second.err(), HasSubstr(kNotBound));
}

TEST_F(BindToCores, AKilledLauncherFreesItsCores) {
  auto job = start(cores_, 2, "echo up; exec sleep 1000");
  job.wait_for("[rank1]: up");
  job.signal(SIGKILL);
  EXPECT_EQ(job.wait(), 128 + SIGKILL);
  EXPECT_TRUE(eventually([&] {
    auto next = start(cores_, 2, "true");
    next.wait();
    return next.err().find("of its own") != std::string::npos;
  }));
}

}  // namespace
}  // namespace paceline
