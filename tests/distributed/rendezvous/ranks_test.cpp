// Ranks that do not come, come late, or ended since the last world.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sys/mman.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include <atomic>
#include <chrono>
#include <csignal>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <paceline/collectives.h>

#include "base/unique_fd.h"
#include "distributed/rendezvous/rendezvous_fixture.h"
#include "support/eventually.h"
#include "support/shared.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

using namespace std::chrono_literals;
using test::failure_to_join;
using test::kLate;
using test::kTimeout;
using test::Port;
using test::RankContext;
using test::Rendezvous;
using ::testing::StartsWith;

// A rank that comes when the others have given up, for whose words it finds all it needs.
TEST_F(Rendezvous, LateRankLearnsThatItWasMissing) {
  const test::Shared<std::atomic<int>> gave_up;
  const auto store = [&] { return c10::make_intrusive<c10d::FileStore>(path(), -1); };
  const auto kept = store();  // the last one to go removes the file
  const auto ends = test::run_process_ranks(3, [&](int rank, shm::BootstrapSockets) {
    if (rank == 1) {
      EXPECT_TRUE(test::eventually([&] { return *gave_up == 2; }));
    }
    const auto text =
        failure_to_join({.timeout = kTimeout, .world_size = 3, .rank = rank, .store = store()});
    if (rank != 1) ++*gave_up;
    return text;
  });
  for (const auto& end : ends) {
    EXPECT_THAT(end.report, StartsWith("PeerError(1): rank 1 did not come to the rendezvous"));
  }
}

// Rank 0, which serves the store, has to outwait a rank that has come and died.
TEST_F(Rendezvous, NamesAMissingRankEvenIfAnotherDied) {
  const std::string tcp = Port().method();
  const auto ends = test::run_process_ranks(3, [&](int rank, shm::BootstrapSockets) {
    if (rank == 2) return std::string();
    if (rank == 1) {
      std::thread([] {
        std::this_thread::sleep_for(kTimeout);
        std::raise(SIGKILL);
      }).detach();
    }
    return failure_to_join(
        {.init_method = tcp, .timeout = 3 * kTimeout, .world_size = 3, .rank = rank});
  });
  EXPECT_THAT(ends[0].report, StartsWith("PeerError(2): rank 2 did not come to the rendezvous"));
}

TEST_F(Rendezvous, NamesMissingRanks) {
  for (const auto& backend : test::backends()) {
    const std::string tcp = Port().method();
    for (const std::string& where : {method(), tcp}) {
      const auto ends =
          test::run_process_ranks(4, [&](int rank, shm::BootstrapSockets) -> std::string {
            if (rank % 2 == 1) return "";
            return failure_to_join({.backend = backend,
                                    .init_method = where,
                                    .timeout = 2 * kTimeout,
                                    .world_size = 4,
                                    .rank = rank});
          });
      for (const std::size_t rank : {0, 2}) {
        EXPECT_THAT(ends[rank].report,
                    StartsWith("PeerError(1,3): ranks 1 and 3 did not come to the rendezvous "
                               "within the timeout of 2 s; this is rank "))
            << backend << " over " << where;
      }
      ::unlink(path().c_str());
    }
  }
}

TEST_F(Rendezvous, InvalidOptionsDoNotCountAsAnAttempt) {
  for (const auto& backend : test::backends()) {
    const auto ends = test::run_torch_ranks(2, backend, [](const RankContext& context) {
      if (context.rank == 1) {
        for (const auto& change : std::vector<std::function<void(InitOptions&)>>{
                 [](InitOptions& options) { options.backend = "mpi"; },
                 [](InitOptions& options) { options.timeout = 0ms; },
                 [](InitOptions& options) { options.rank = -1; },
                 [](InitOptions& options) { options.rank = 2; }}) {
          auto wrong = context.init;
          change(wrong);
          EXPECT_THAT(failure_to_join(wrong), StartsWith("UsageError"));
        }
      }
      auto options = context.init;
      options.timeout = 20s;
      return failure_to_join(options);
    });
    for (const auto& end : ends) EXPECT_EQ(end.report, "joined");
  }
}

// Under a launcher ranks are the same processes for ever.
TEST_F(Rendezvous, NamesARankThatEndedBetweenTwoWorlds) {
  constexpr int kSize = 3;
  const base::UniqueFd memory(::memfd_create("store", 0));
  const auto ends =
      test::run_process_ranks(kSize, [&](int rank, shm::BootstrapSockets sockets) -> std::string {
        std::string descriptors;
        for (auto& link : sockets) {
          descriptors += (descriptors.empty() ? "" : ",") + std::to_string(link.release());
        }
        test::set_variables({{"RANK", std::to_string(rank)},
                             {"WORLD_SIZE", std::to_string(kSize)},
                             {"PACELINE_BOOTSTRAP_SOCKETS", descriptors},
                             {"PACELINE_STORE_FD", std::to_string(memory.get())}});
        {
          const World world = init_process_group();
          barrier();
        }
        return rank == 1 ? "ended" : failure_to_join({.timeout = 2 * kLate});
      });
  for (const std::size_t rank : {0, 2}) {
    EXPECT_EQ(ends[rank].report,
              "PeerError(1): rank 1 was lost (its process ended) and did not come to the "
              "rendezvous again");
  }
}

// Ranks that are faster to the next world than rank 0 is in leaving the last one.
TEST_F(Rendezvous, WorldsFollowEachOtherAtOneAddress) {
  for (const auto& backend : test::backends()) {
    const std::string tcp = Port().method();
    const auto ends =
        test::run_process_ranks(3, [&](int rank, shm::BootstrapSockets) -> std::string {
          for (int world = 0; world < 20; ++world) {
            const auto text = failure_to_join({.backend = backend,
                                               .init_method = tcp,
                                               .timeout = 2 * kLate,
                                               .world_size = 3,
                                               .rank = rank});
            if (text != "joined") return text;
          }
          return "joined";
        });
    for (const auto& end : ends) EXPECT_EQ(end.report, "joined") << backend;
  }
}

// Rank 0 serves the store, in which the others look for why it leaves.
TEST_F(Rendezvous, RankThatEndedBetweenTwoWorldsIsNamedWhereRankZeroServes) {
  constexpr int kSize = 4;
  for (const bool by_url : {false, true}) {
    const std::string port = Port().number();
    const InitOptions options{.init_method = by_url ? "tcp://127.0.0.1:" + port : "env://",
                              .timeout = 2 * kLate};
    const auto ends =
        test::run_process_ranks(kSize, [&](int rank, shm::BootstrapSockets) -> std::string {
          test::set_variables({{"RANK", std::to_string(rank)},
                               {"WORLD_SIZE", std::to_string(kSize)},
                               {"MASTER_ADDR", "127.0.0.1"},
                               {"MASTER_PORT", port}});
          {
            const World world = init_process_group(options);
            barrier();
          }
          return rank == 2 ? "ended" : failure_to_join(options);
        });
    for (const std::size_t rank : {0, 1, 3}) {
      EXPECT_EQ(ends[rank].report,
                "PeerError(2): rank 2 was lost (its process ended) and did not come to the "
                "rendezvous again")
          << "rank " << rank << (by_url ? " by tcp://" : " by MASTER_ADDR");
    }
  }
}

}  // namespace
}  // namespace paceline
