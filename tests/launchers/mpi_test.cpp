// Worlds of MPI's communicators, with each MPI that Debian has.
#include <gtest/gtest.h>

#include <string>

#include "launchers/mpirun.h"
#include "support/child_process.h"

namespace paceline {
namespace {

using test::ChildProcess;

class MpiCommunicators : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (const auto reason = test::why_no_mpi_program(GetParam()); !reason.empty()) {
      GTEST_SKIP() << reason;
    }
  }

  void run(int ranks, const std::string& mode) {
    const std::string mpi = GetParam();
    auto command = test::mpirun("/usr/bin/mpirun." + mpi, mpi == "openmpi");
    command.insert(command.end(), {"-n", std::to_string(ranks), test::mpi_program(mpi), mode});
    ChildProcess mpirun(command, test::kAllowRoot);
    EXPECT_EQ(mpirun.wait(), 0) << mpirun.err();
  }
};

TEST_P(MpiCommunicators, FormWorlds) {
  for (const int ranks : {1, 2, 3, 8}) run(ranks, "world");
}

TEST_P(MpiCommunicators, FormWorldsSideBySide) {
  run(2, "trainers");
  run(6, "trainers");
}

TEST_P(MpiCommunicators, RefuseWhatIsNoWorld) {
  run(2, "errors");
}

INSTANTIATE_TEST_SUITE_P(Of, MpiCommunicators, ::testing::Values("mpich", "openmpi"),
                         [](const auto& one) { return std::string(one.param); });

}  // namespace
}  // namespace paceline
