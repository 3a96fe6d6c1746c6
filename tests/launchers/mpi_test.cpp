// Worlds of MPI's communicators, with each MPI that Debian has.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "launchers/mpirun.h"
#include "launchers/trained.h"
#include "support/child_process.h"
#include "support/eventually.h"

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

// Open MPI 4.1's mpirun sometimes waits for itself in PMIx_server_finalize, or crashes there, if it
// has ended ranks itself. So this waits for the ranks.
TEST_P(MpiCommunicators, FaultsOverTheBackendMpiAreNamed) {
  auto mpirun = start(3, {test::mpi_program(GetParam()), "faults"});
  for (int rank = 0; rank < 3; ++rank) mpirun.wait_for(fmt::format("rank {}: all were", rank));
  for (const pid_t rank : test::pids_after(mpirun.out(), "pid")) {
    EXPECT_TRUE(test::eventually([&] { return test::has_ended(rank); }));
  }
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
  mpirun.wait_for("no more data");
  if (GetParam() == std::string("mpich")) {
    EXPECT_NE(mpirun.wait(), 0);
    return;
  }
  // See above: here, the ranks are mpirun's children.
  EXPECT_TRUE(test::eventually([&] {
    std::ifstream children(fmt::format("/proc/{0}/task/{0}/children", mpirun.pid()));
    using Pids = std::istream_iterator<pid_t>;
    return std::all_of(Pids(children), Pids(), test::has_ended);
  }));
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
