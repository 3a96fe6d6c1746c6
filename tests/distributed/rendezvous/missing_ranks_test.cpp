// Ranks that do not come, come late, or ended since the last world.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sys/mman.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
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
using test::failure_alone;
using test::failure_to_join;
using test::kLate;
using test::kTimeout;
using test::Port;
using test::RankContext;
using test::Rendezvous;
using ::testing::StartsWith;

// Long enough for ranks that start together to meet, on a busy machine too.
constexpr std::chrono::seconds kMeeting{5};

// Returns once `count` ranks have called it, so that their timeouts begin together.
void start_together(std::atomic<int>& ready, int count) {
  ++ready;
  EXPECT_TRUE(test::eventually([&] { return ready >= count; }));
}

TEST_F(Rendezvous, RanksWithDifferentBackendsAreNamed) {
  if (!is_gloo_available()) GTEST_SKIP() << "built without Gloo";
  const auto ends = test::run_process_ranks(3, [&](int rank, shm::BootstrapSockets) {
    return failure_to_join({.backend = rank == 1 ? "gloo" : "paceline",
                            .init_method = method(),
                            .timeout = test::kTestTimeout,
                            .world_size = 3,
                            .rank = rank});
  });
  for (const auto& end : ends) {
    EXPECT_EQ(
        end.report,
        "UsageError: the ranks of the world have different backends: rank 1 gloo, ranks 0 and "
        "2 paceline");
  }
}

// A rank that comes after the others have timed out. It finds the keys of all ranks.
TEST_F(Rendezvous, LateRankLearnsThatItWasMissing) {
  const test::Shared<std::atomic<int>> ready;
  const test::Shared<std::atomic<int>> timed_out;
  const auto store = [&] { return c10::make_intrusive<c10d::FileStore>(path(), -1); };
  const auto kept = store();  // the last one to go removes the file
  const auto ends = test::run_process_ranks(3, [&](int rank, shm::BootstrapSockets) {
    if (rank == 1) {
      EXPECT_TRUE(test::eventually([&] { return *timed_out == 2; }));
    } else {
      start_together(*ready, 2);
    }
    const auto text =
        failure_to_join({.timeout = kMeeting, .world_size = 3, .rank = rank, .store = store()});
    if (rank != 1) ++*timed_out;
    return text;
  });
  for (const auto& end : ends) {
    EXPECT_THAT(end.report, StartsWith("PeerError(1): rank 1 did not come to the rendezvous"));
  }
}

// Its process dies once it has announced itself and looks for the other ranks.
class StoreOfADyingRank : public c10d::TCPStore {
 public:
  StoreOfADyingRank(const c10d::TCPStoreOptions& options, std::atomic<bool>& dying)
      : TCPStore("127.0.0.1", options), dying_(dying) {}

  bool check(const std::vector<std::string>&) override {
    dying_ = true;
    std::raise(SIGKILL);
    return false;
  }

 private:
  std::atomic<bool>& dying_;
};

// Rank 0, which serves the store, has to outwait a rank that has come and died.
TEST_F(Rendezvous, NamesAMissingRankEvenIfAnotherDied) {
  const test::Shared<std::atomic<std::uint16_t>> port;
  const test::Shared<std::atomic<bool>> died;
  const auto ends = test::run_process_ranks(3, [&](int rank, shm::BootstrapSockets) {
    if (rank == 2) return std::string();
    InitOptions options{.timeout = kTimeout, .world_size = 3, .rank = rank};
    c10d::TCPStoreOptions tcp{.port = 0, .isServer = rank == 0, .waitWorkers = false};
    if (rank == 0) {
      const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", tcp);
      *port = store->getPort();
      options.store = store;
      EXPECT_TRUE(test::eventually([&] { return died->load(); }));
    } else {
      EXPECT_TRUE(test::eventually([&] { return *port != 0; }));
      tcp.port = *port;
      options.store = c10::make_intrusive<StoreOfADyingRank>(tcp, *died);
    }
    return failure_to_join(std::move(options));
  });
  EXPECT_TRUE(ends[1].killed());
  EXPECT_THAT(ends[0].report, StartsWith("PeerError(2): rank 2 did not come to the rendezvous"));
}

TEST_F(Rendezvous, NamesMissingRanks) {
  const auto backends = test::backends();
  test::run_side_by_side(2 * backends.size(), [&](std::size_t i) {
    const auto& backend = backends[i / 2];
    const auto where = i % 2 == 0 ? method() + backend : Port().method();
    const test::Shared<std::atomic<int>> ready;
    const auto ends =
        test::run_process_ranks(4, [&](int rank, shm::BootstrapSockets) -> std::string {
          if (rank % 2 == 1) return "";
          start_together(*ready, 2);
          return failure_to_join({.backend = backend,
                                  .init_method = where,
                                  .timeout = kMeeting,
                                  .world_size = 4,
                                  .rank = rank});
        });
    for (const std::size_t rank : {0, 2}) {
      EXPECT_THAT(ends[rank].report,
                  StartsWith("PeerError(1,3): ranks 1 and 3 did not come to the rendezvous "
                             "within the timeout of 5 s; this is rank "))
          << backend << " over " << where;
    }
  });
}

// Whichever of the ranks comes first, and whichever has the larger world.
TEST_F(Rendezvous, DifferentWorldSizesAreNamedAtOnce) {
  test::run_side_by_side(4, [](std::size_t i) {
    const int first = static_cast<int>(i) % 2;
    const int size_of_rank_0 = 2 + static_cast<int>(i) / 2;
    const test::Shared<std::atomic<bool>> came;
    const auto where = Port().method();
    const auto ends = test::run_process_ranks(2, [&](int rank, shm::BootstrapSockets) {
      if (rank != first) {
        EXPECT_TRUE(test::eventually([&] { return came->load(); }));
      }
      *came = true;
      return failure_to_join({.init_method = where,
                              .timeout = 10 * kLate,
                              .world_size = rank == 0 ? size_of_rank_0 : 5 - size_of_rank_0,
                              .rank = rank});
    });
    for (const auto& end : ends) {
      EXPECT_THAT(end.report,
                  StartsWith("UsageError: the ranks disagree on the size of the world: some were "
                             "given 2 ranks, others 3. Give all ranks the same world size"));
    }
  });
}

// A rank of a larger world decides last, or first; who decides first decides for all.
class StoreInOrder : public c10d::FileStore {
 public:
  StoreInOrder(const std::string& path, bool first, std::atomic<bool>& decided)
      : FileStore(path, -1), first_(first), decided_(decided) {}

  std::vector<std::uint8_t> compareSet(const std::string& key,
                                       const std::vector<std::uint8_t>& expected,
                                       const std::vector<std::uint8_t>& desired) override {
    if (!first_) {
      EXPECT_TRUE(test::eventually([&] { return decided_.load(); }));
    }
    auto value = FileStore::compareSet(key, expected, desired);
    decided_ = true;
    return value;
  }

 private:
  bool first_;
  std::atomic<bool>& decided_;
};

TEST_F(Rendezvous, RanksThatAreCompleteAreNotDisturbedByARankOfALargerWorld) {
  for (const bool disturbed : {false, true}) {
    const auto file = path() + (disturbed ? "1" : "0");
    const test::Shared<std::atomic<bool>> decided;
    const auto kept = c10::make_intrusive<c10d::FileStore>(file, -1);
    const auto ends = test::run_process_ranks(3, [&](int rank, shm::BootstrapSockets) {
      return failure_to_join(
          {.timeout = 10 * kLate,
           .world_size = rank == 2 ? 3 : 2,
           .rank = rank,
           .store = c10::make_intrusive<StoreInOrder>(file, (rank == 2) == disturbed, *decided)});
    });
    for (std::size_t rank = 0; rank < 3; ++rank) {
      const bool fails = disturbed || rank == 2;
      EXPECT_THAT(ends[rank].report,
                  StartsWith(fails ? "UsageError: the ranks disagree" : "joined"))
          << "rank " << rank;
    }
  }
}

// Rank 0 serves the store, and has the smaller world.
TEST_F(Rendezvous, ARankOfTheLargerWorldThatComesLaterLearnsTheSizesToo) {
  const test::Shared<std::atomic<bool>> known;
  const auto where = Port().method();
  const auto ends = test::run_process_ranks(3, [&](int rank, shm::BootstrapSockets) {
    if (rank == 2) {
      EXPECT_TRUE(test::eventually([&] { return known->load(); }));
    }
    auto text = failure_to_join({.init_method = where,
                                 .timeout = 10 * kLate,
                                 .world_size = rank == 0 ? 2 : 3,
                                 .rank = rank});
    if (rank == 1) *known = true;
    return text;
  });
  for (const auto& end : ends) {
    EXPECT_THAT(end.report, StartsWith("UsageError: the ranks disagree on the size of the world"));
  }
}

// How many ranks a backend can have depends on their nodes, which are not known before.
TEST_F(Rendezvous, TheLargestWorldIsCheckedBeforeTheRanksMeet) {
  EXPECT_EQ(
      failure_alone(
          {.init_method = Port().method(), .timeout = 10 * kLate, .world_size = 1025, .rank = 1}),
      "UsageError: a world of 1025 ranks: 1 to 1024 are allowed");
}

TEST_F(Rendezvous, InvalidOptionsDoNotCountAsAnAttempt) {
  for (const auto& backend : test::backends()) {
    const auto ends = test::run_torch_ranks(2, backend, [](const RankContext& context) {
      if (context.rank == 1) {
        for (const auto& change : std::vector<std::function<void(InitOptions&)>>{
                 [](InitOptions& options) { options.backend = "none"; },
                 [](InitOptions& options) { options.timeout = 0ms; },
                 [](InitOptions& options) { options.rank = -1; },
                 [](InitOptions& options) { options.rank = 2; }}) {
          auto wrong = context.init;
          change(wrong);
          EXPECT_THAT(failure_to_join(wrong), StartsWith("UsageError"));
        }
      }
      auto options = context.init;
      options.timeout = kLate;
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
