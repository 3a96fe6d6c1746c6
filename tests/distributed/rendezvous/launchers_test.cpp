// Ranks that other launchers started, by the variables that these set.

#include <ATen/Parallel.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <paceline/collectives.h>

#include "base/cores.h"
#include "base/hash.h"
#include "base/launcher.h"
#include "distributed/rendezvous/rendezvous_fixture.h"
#include "shm/membership/bootstrap_packets.h"
#include "shm/membership/socket.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

using test::failure_to_join;
using test::kLate;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Variables = std::map<std::string, std::string>;

// Patient enough for a busy machine: all ranks that come have to come within it.
constexpr std::chrono::seconds kGathering{5};

// A process runs its tests one after the other, so no two share the job.
Variables mpirun(int rank, int size) {
  return {{"OMPI_COMM_WORLD_RANK", std::to_string(rank)},
          {"OMPI_COMM_WORLD_SIZE", std::to_string(size)},
          {"OMPI_COMM_WORLD_LOCAL_RANK", std::to_string(rank)},
          {"OMPI_COMM_WORLD_LOCAL_SIZE", std::to_string(size)},
          {"PMIX_NAMESPACE", "test-" + std::to_string(::getppid())}};
}

// Each rank on a node of its own, all of which are this machine.
Variables srun(int rank, int size, const std::string& port) {
  return {{"SLURM_STEP_ID", "0"},
          {"SLURM_JOB_ID", std::to_string(::getppid())},
          {"SLURM_STEP_NUM_TASKS", std::to_string(size)},
          {"SLURM_PROCID", std::to_string(rank)},
          {"SLURM_LOCALID", "0"},
          {"SLURM_NODEID", std::to_string(rank)},
          {"SLURM_STEP_TASKS_PER_NODE", "1(x" + std::to_string(size) + ")"},
          {"SLURM_STEP_NODELIST", "localhost"},
          {"MASTER_PORT", port}};
}

using Launcher = std::function<Variables(int rank, int size)>;

std::vector<test::RankEnd> run_under(const Launcher& launcher, int size,
                                     const std::function<std::string(int rank)>& body) {
  return test::run_process_ranks(size, [&](int rank, shm::BootstrapSockets) {
    for (const char* const name : {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}) ::unsetenv(name);
    test::set_variables(launcher(rank, size));
    return body(rank);
  });
}

void expect_clean(const std::vector<test::RankEnd>& ends) {
  for (const auto& end : ends) EXPECT_TRUE(end.exited_cleanly()) << end.report;
}

TEST(Launchers, RanksOfMpirunMeetOnOneMachineWithoutAnAddress) {
  for (const int size : {2, 3, 8}) {
    expect_clean(run_under(mpirun, size, [=](int rank) {
      EXPECT_EQ(get_local_rank(), rank);  // before init, too
      for (int world = 0; world < 2; ++world) {
        const World member = init_process_group({.timeout = 2 * kLate});
        EXPECT_EQ(get_rank(), rank);
        EXPECT_EQ(get_world_size(), size);
        EXPECT_EQ(get_local_world_size(), size);
        const at::Tensor sum = at::full({3}, 1.0);
        all_reduce(sum);
        EXPECT_EQ(sum[0].item<double>(), size);
      }
      return std::string();
    }));
  }
}

TEST(Launchers, RanksOfSrunMeetAtTheFirstNode) {
  if (!is_gloo_available()) GTEST_SKIP() << "built without Gloo";
  const auto launcher = [port = test::Port().number()](int rank, int size) {
    return srun(rank, size, port);
  };
  expect_clean(run_under(launcher, 3, [](int rank) {
    const World world = init_process_group({.backend = "gloo", .timeout = 2 * kLate});
    EXPECT_EQ(get_node_rank(), rank);
    const at::Tensor sum = at::full({1}, 1.0);
    all_reduce(sum);
    EXPECT_EQ(sum.item<double>(), 3);
    return std::string();
  }));
}

TEST(Launchers, RanksShareTheCoresOfTheirMachine) {
  const int cores = base::available_cores();
  const int many = cores + 16;  // each takes a stack, and a stack may take a huge page
  for (const bool is_set : {false, true}) {
    const auto launcher = [=](int rank, int size) {
      auto variables = mpirun(rank, size);
      if (is_set) variables["OMP_NUM_THREADS"] = "3";
      return variables;
    };
    expect_clean(run_under(launcher, 2, [=](int) {
      at::set_num_threads(many);
      const World world = init_process_group({.timeout = 2 * kLate});
      EXPECT_EQ(at::get_num_threads(), is_set ? many : std::max(1, cores / 2));
      return std::string();
    }));
  }
}

TEST(Launchers, MissingRanksAreNamed) {
  const auto ends = run_under(mpirun, 4, [](int rank) {
    if (rank == 1 || rank == 3) return std::string("did not come");
    return failure_to_join({.timeout = kGathering});
  });
  for (const std::size_t rank : {0, 2}) {  // whichever gave up first
    EXPECT_THAT(ends[rank].report,
                AllOf(StartsWith("PeerError(1,3): ranks 1 and 3 did not come to the rendezvous of "
                                 "the processes on this machine (mpirun (Open MPI)/test-"),
                      HasSubstr("within the timeout of 5 s")));
  }
}

TEST(Launchers, RankZeroMayBeMissing) {
  const auto ends = run_under(mpirun, 2, [](int rank) {
    return rank == 0 ? std::string() : failure_to_join({.timeout = kGathering});
  });
  EXPECT_THAT(ends[1].report, StartsWith("PeerError(0): rank 0 did not come"));
}

TEST(Launchers, ARankThatEndsAtTheRendezvousIsNamed) {
  const auto ends = run_under(mpirun, 3, [](int rank) {
    if (rank == 0) return failure_to_join({.timeout = 2 * kLate});
    if (rank == 1) return std::string();  // keeps the others waiting
    const std::string job = fmt::format("mpirun (Open MPI)/test-{}", ::getppid());
    const std::string name =
        fmt::format("paceline-{}-{:x}-paceline/0/0", ::geteuid(), base::hash(job));
    base::UniqueFd socket;
    while (!(socket = shm::connect_abstract(name))) ::sched_yield();
    shm::send_packet(socket.get(), encode(shm::Hello{shm::kProtocol, 2, 3, 0}), {},
                     base::Deadline::after(kLate));
    return std::string();
  });
  EXPECT_THAT(ends[0].report,
              StartsWith("PeerError(2): rank 2 ended before all ranks had come to the"));
}

TEST(Launchers, ProcessesThatDoNotBelongTogetherAreTold) {
  const auto twice = [](int rank, int size) { return mpirun(rank == 2 ? 1 : rank, size); };
  for (const auto& end :
       run_under(twice, 3, [](int) { return failure_to_join({.timeout = 2 * kLate}); })) {
    EXPECT_THAT(end.report, AllOf(StartsWith("PeerError(1): a process came to the rendezvous"),
                                  HasSubstr("as rank 1 of 3, where another process has that")));
  }
  const auto sizes = [](int rank, int) { return mpirun(rank, rank + 2); };
  for (const auto& end :
       run_under(sizes, 2, [](int) { return failure_to_join({.timeout = 2 * kLate}); })) {
    EXPECT_THAT(end.report, HasSubstr("as rank 1 of 3, where 2 ranks meet"));
  }
}

}  // namespace
}  // namespace paceline
