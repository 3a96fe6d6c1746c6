// Worlds of MPI's communicators, with each MPI that Debian has.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "launchers/mpirun.h"
#include "launchers/trained.h"
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

  static ChildProcess start(int ranks, const std::vector<std::string>& program) {
    const std::string mpi = GetParam();
    auto command = test::mpirun("/usr/bin/mpirun." + mpi, mpi == "openmpi");
    command.insert(command.end(), {"-n", std::to_string(ranks)});
    command.insert(command.end(), program.begin(), program.end());
    return ChildProcess(command, test::kAllowRoot);
  }
  // Ranks of the program that is linked to this MPI.
  static void run(int ranks, const std::string& mode) {
    auto mpirun = start(ranks, {test::mpi_program(GetParam()), mode});
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

TEST_P(MpiCommunicators, CarryTheBackendMpi) {
  run(4, "backend");
  run(4, "owner");
}

TEST_P(MpiCommunicators, DriveAllCallsWhileOneThreadWaits) {
  run(3, "waits");
}

TEST_P(MpiCommunicators, FaultsOverTheBackendMpiAreNamed) {
  auto mpirun = start(3, {test::mpi_program(GetParam()), "faults"});
  mpirun.wait();
  const std::string& out = mpirun.out();
  std::size_t ranks = 0;
  for (auto at = out.find("all were"); at != std::string::npos; at = out.find("all were", at + 1)) {
    ++ranks;
  }
  EXPECT_EQ(ranks, 3) << out << mpirun.err();
}

// The program is linked to no MPI.
TEST_P(MpiCommunicators, TrainAProgramWithoutMpi) {
  for (const int ranks : {2, 3}) {
    auto mpirun = start(ranks, {TRAIN_PROGRAM, "mpi"});
    EXPECT_EQ(mpirun.wait(), 0) << mpirun.err();
    test::expect_trained(mpirun.out(), ranks);
  }
}

TEST_P(MpiCommunicators, EndAJobWhoseRankThrows) {
  auto mpirun = start(3, {TRAIN_PROGRAM, "mpi", "throws"});
  EXPECT_NE(mpirun.wait(), 0);
  EXPECT_THAT(mpirun.err(), ::testing::HasSubstr("no more data"));
}

TEST(Mpi, IsNeededByItsBackend) {
  if (!std::filesystem::exists("/usr/bin/mpirun.mpich")) GTEST_SKIP() << "Debian has mpich";
  ChildProcess launcher({PACELINE_COMMAND, "run", "--nproc-per-node=2", TRAIN_PROGRAM, "mpi"});
  EXPECT_NE(launcher.wait(), 0);
  EXPECT_THAT(launcher.err(), ::testing::AnyOf(::testing::HasSubstr("one mpirun"),
                                               ::testing::HasSubstr("the mpirun of one")));
}

TEST_P(MpiCommunicators, AreABackendForDoctor) {
  ChildProcess doctor({PACELINE_COMMAND, "doctor", "--no-self-test"});
  doctor.wait();
  EXPECT_THAT(doctor.out(), ::testing::HasSubstr("for ranks that mpirun has started"));
}

INSTANTIATE_TEST_SUITE_P(Of, MpiCommunicators, ::testing::Values("mpich", "openmpi"),
                         [](const auto& one) { return std::string(one.param); });

}  // namespace
}  // namespace paceline
