// Meeting places that are wrong, silent or stale, ranks that do not come, and launchers that are
// not understood.

#include <ATen/ATen.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <paceline/collectives.h>

#include "base/environment.h"
#include "base/unique_fd.h"
#include "distributed/rendezvous/plan.h"
#include "support/eventually.h"
#include "support/shared.h"
#include "support/temporary_directory.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

using namespace std::chrono_literals;
using test::RankContext;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr std::chrono::seconds kTimeout{1};
// Far more than it takes, for machines that have other things to do.
constexpr std::chrono::seconds kLate{30};

// What a rank throws that cannot join, which it must find out in time.
std::string failure_to_join(InitOptions options) {
  const auto begin = std::chrono::steady_clock::now();
  std::string text = "joined";
  try {
    const World world = init_process_group(std::move(options));
  } catch (const UsageError& error) {
    text = fmt::format("UsageError: {}", error.what());
  } catch (const PeerError& error) {
    text = fmt::format("PeerError({}): {}", fmt::join(error.ranks(), ","), error.what());
  } catch (const Error& error) {
    text = fmt::format("Error: {}", error.what());
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, kLate) << text;
  return text;
}

// The same in a process of its own, whose environment may be changed.
std::string failure_alone(const InitOptions& options,
                          const std::map<std::string, std::string>& environment = {}) {
  const auto ends = test::run_process_ranks(1, [&](int, shm::BootstrapSockets) {
    for (const auto& [name, value] : environment) ::setenv(name.c_str(), value.c_str(), 1);
    return failure_to_join(options);
  });
  EXPECT_TRUE(ends[0].exited_cleanly()) << ends[0].report;
  return ends[0].report;
}

InitOptions rank_1_of_2(const std::string& method) {
  return {.init_method = method, .timeout = kTimeout, .world_size = 2, .rank = 1};
}

// Bound to a port of the loopback that nobody else uses; listens if it is told to.
class Port {
 public:
  Port() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    auto* const at = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(::bind(socket_.get(), at, length), 0);
    EXPECT_EQ(::getsockname(socket_.get(), at, &length), 0);
    number_ = ntohs(address.sin_port);
  }
  void listen() const { EXPECT_EQ(::listen(socket_.get(), 16), 0); }
  std::string number() const { return std::to_string(number_); }
  std::string method() const { return "tcp://127.0.0.1:" + number(); }

 private:
  base::UniqueFd socket_;
  int number_ = 0;
};

class Rendezvous : public ::testing::Test {
 protected:
  std::string path() const { return directory_.path() / "store"; }
  std::string method() const { return "file://" + path(); }

 private:
  const test::TemporaryDirectory directory_;
};

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

TEST_F(Rendezvous, RejectsAFileOfAnotherFormat) {
  std::mt19937 random(1);
  std::string noise(3000, '\0');
  for (char& byte : noise) byte = static_cast<char>(random());
  const std::string count("\x09\0\0\0refcount/\x01\0\0\0001", 18);
  for (const std::string& content :
       {noise, std::string("x"), count + noise, count.substr(0, 17), count.substr(0, 13)}) {
    std::ofstream(path(), std::ios::binary) << content;
    EXPECT_THAT(failure_alone(rank_1_of_2(method())),
                StartsWith("UsageError: " + method() + " is not a c10d::FileStore"))
        << content.size();
  }
}

TEST_F(Rendezvous, RejectsAPathThatCannotBeAFile) {
  EXPECT_THAT(failure_alone(rank_1_of_2(method() + "/no/such")),
              AllOf(HasSubstr(method() + "/no/such"), HasSubstr("(ENOENT)")));
  EXPECT_THAT(failure_alone(rank_1_of_2("file:///tmp")), HasSubstr("(EISDIR)"));
  ASSERT_EQ(::mkfifo(path().c_str(), 0600), 0);
  EXPECT_THAT(failure_alone(rank_1_of_2(method())), HasSubstr("is not a c10d::FileStore"));
}

TEST_F(Rendezvous, WaitsForALockedFileUntilTheTimeout) {
  std::ofstream(path()).flush();
  const base::UniqueFd held(::open(path().c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_EQ(::flock(held.get(), LOCK_EX), 0);
  EXPECT_THAT(failure_alone(rank_1_of_2(method())),
              AllOf(HasSubstr(method() + " stayed locked for the timeout of 1 s"),
                    HasSubstr("this is rank 1 of 2")));
}

TEST_F(Rendezvous, RejectsTheFileOfAKilledJob) {
  for (const auto& backend : test::backends()) {
    const auto options = [&](int rank) {
      return InitOptions{
          .backend = backend, .init_method = method(), .world_size = 2, .rank = rank};
    };
    test::run_process_ranks(2, [&](int rank, shm::BootstrapSockets) -> std::string {
      const World world = init_process_group(options(rank));
      barrier();
      std::raise(SIGKILL);
      return "";
    });
    const auto ends = test::run_process_ranks(
        2, [&](int rank, shm::BootstrapSockets) { return failure_to_join(options(rank)); });
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_THAT(ends[static_cast<std::size_t>(rank)].report,
                  AllOf(StartsWith(fmt::format("UsageError: {} has been joined by a rank {} before",
                                               method(), rank)),
                        HasSubstr("rm " + path())));
    }
    ::unlink(path().c_str());
  }
}

TEST_F(Rendezvous, SilentListenerTimesOutAndBlamesRankZero) {
  const Port port;
  port.listen();
  const auto text = StartsWith("PeerError(0): the rendezvous at 127.0.0.1:" + port.number() +
                               ", which rank 0 serves, did not answer "
                               "within the timeout of 1 s; this is rank 1 of 2");
  EXPECT_THAT(failure_alone(rank_1_of_2(port.method())), text);
  std::map<std::string, std::string> environment{{"RANK", "1"},
                                                 {"WORLD_SIZE", "2"},
                                                 {"MASTER_ADDR", "127.0.0.1"},
                                                 {"MASTER_PORT", port.number()}};
  EXPECT_THAT(failure_alone({.timeout = kTimeout}, environment), text);
  environment["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  EXPECT_THAT(failure_alone({.timeout = kTimeout}, environment),
              AllOf(StartsWith("PeerError(): "), HasSubstr("which the launcher serves")));
}

TEST_F(Rendezvous, MissingServerTimesOutAndBlamesRankZero) {
  EXPECT_THAT(failure_alone(rank_1_of_2(Port().method())),
              AllOf(StartsWith("PeerError(0): the rendezvous at 127.0.0.1:"),
                    HasSubstr("which rank 0 serves, did not answer within the timeout of 1 s")));
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

// As one whose server is stopped.
class SilentStore : public c10d::HashStore {
 public:
  void set(const std::string&, const std::vector<std::uint8_t>&) override {
    while (true) ::pause();
  }
};

TEST_F(Rendezvous, SilentUserStoreTimesOut) {
  for (const auto& backend : test::backends()) {
    EXPECT_THAT(failure_alone({.backend = backend,
                               .timeout = kTimeout,
                               .world_size = 2,
                               .rank = 1,
                               .store = c10::make_intrusive<SilentStore>()}),
                StartsWith("PeerError(): the store did not answer within the timeout of 1 s; this "
                           "is rank 1 of 2"));
  }
}

TEST_F(Rendezvous, NamesAMissingInheritedStore) {
  EXPECT_THAT(failure_alone({}, {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"PACELINE_STORE_FD", "999"}}),
              AllOf(StartsWith("Error: cannot use /proc/self/fd/999 (PACELINE_STORE_FD"),
                    HasSubstr("(ENOENT)")));
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
        for (const auto& [name, value] : std::map<std::string, std::string>{
                 {"RANK", std::to_string(rank)},
                 {"WORLD_SIZE", std::to_string(kSize)},
                 {"PACELINE_BOOTSTRAP_SOCKETS", descriptors},
                 {"PACELINE_STORE_FD", std::to_string(memory.get())}}) {
          ::setenv(name.c_str(), value.c_str(), 1);
        }
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
          for (const auto& [name, value] :
               std::map<std::string, std::string>{{"RANK", std::to_string(rank)},
                                                  {"WORLD_SIZE", std::to_string(kSize)},
                                                  {"MASTER_ADDR", "127.0.0.1"},
                                                  {"MASTER_PORT", port}}) {
            ::setenv(name.c_str(), value.c_str(), 1);
          }
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

// Processes of one machine that their launcher says are on several nodes: `places` has GROUP_RANK,
// LOCAL_RANK and LOCAL_WORLD_SIZE of each.
std::vector<test::RankEnd> run_on_nodes(const std::vector<std::array<int, 3>>& places,
                                        const std::function<std::string()>& body) {
  const std::string port = Port().number();
  return test::run_process_ranks(
      static_cast<int>(places.size()), [&](int rank, shm::BootstrapSockets) -> std::string {
        const auto& [node, local_rank, local_size] = places[static_cast<std::size_t>(rank)];
        for (const auto& [name, value] :
             std::map<std::string, int>{{"RANK", rank},
                                        {"WORLD_SIZE", static_cast<int>(places.size())},
                                        {"GROUP_RANK", node},
                                        {"LOCAL_RANK", local_rank},
                                        {"LOCAL_WORLD_SIZE", local_size}}) {
          ::setenv(name.c_str(), std::to_string(value).c_str(), 1);
        }
        ::setenv("MASTER_ADDR", "127.0.0.1", 1);
        ::setenv("MASTER_PORT", port.c_str(), 1);
        return body();
      });
}

TEST_F(Rendezvous, SharedMemoryDoesNotReachOtherNodes) {
  const auto ends = run_on_nodes({{0, 0, 2}, {1, 0, 1}, {0, 1, 2}},
                                 [] { return failure_to_join({.timeout = 2 * kLate}); });
  for (const auto& end : ends) {
    EXPECT_THAT(end.report,
                AllOf(StartsWith("UsageError: the backend paceline reaches the ranks of "
                                 "one node, and those of group world run on 2, by "
                                 "GROUP_RANK: ranks 0 and 2 on node 0 ("),
                      HasSubstr("), rank 1 on node 1 ("), HasSubstr("Use the backend gloo")));
  }
}

TEST_F(Rendezvous, GlooReachesNodesWhichHaveSharedMemoryWithin) {
  if (!is_gloo_available()) GTEST_SKIP() << "built without Gloo";
  const auto ends = run_on_nodes({{0, 0, 2}, {1, 0, 1}, {0, 1, 2}}, [] {
    const World world = init_process_group({.backend = "gloo", .timeout = 2 * kLate});
    const at::Tensor sum = at::full({1}, get_rank() + 1.0);
    all_reduce(sum);
    EXPECT_EQ(sum.item<double>(), 1 + 2 + 3);
    std::string text = "made";
    try {
      const ProcessGroup all = new_group({}, {.backend = "paceline"});
    } catch (const UsageError& error) {
      text = error.what();
    }
    EXPECT_THAT(text, HasSubstr("those of group 1 run on 2"));
    const ProcessGroup near = new_group({0, 2}, {.backend = "paceline"});
    const at::Tensor part = at::full({1}, get_rank() + 1.0);
    all_reduce(part, {.group = near});
    EXPECT_EQ(part.item<double>(), near.is_member() ? 1 + 3 : 2);
    return fmt::format("{} {} {}", get_node_rank(), get_local_rank(), get_local_world_size());
  });
  EXPECT_EQ(ends[0].report, "0 0 2");
  EXPECT_EQ(ends[1].report, "1 0 1");
  EXPECT_EQ(ends[2].report, "0 1 2");
}

TEST_F(Rendezvous, ContradictingVariablesAreRefusedOnEveryRank) {
  for (const auto& backend : test::backends()) {
    const auto ends = run_on_nodes({{0, 0, 1}, {0, 0, 1}}, [&] {
      return failure_to_join({.backend = backend, .timeout = 2 * kLate});
    });
    for (const auto& end : ends) {
      EXPECT_THAT(end.report, StartsWith("UsageError: ranks 0 and 1 have the same GROUP_RANK=0 and "
                                         "LOCAL_RANK=0. "));
    }
  }
}

// The variables of rank 0 alone say that there is one node.
TEST_F(Rendezvous, ContradictionOfOneRankIsRefusedOnEveryRank) {
  for (const auto& backend : test::backends()) {
    const auto ends = run_on_nodes({{0, 0, 3}, {0, 1, 3}, {0, 1, 3}}, [&] {
      return failure_to_join({.backend = backend, .timeout = 2 * kLate});
    });
    for (const auto& end : ends) {
      EXPECT_THAT(end.report, StartsWith("UsageError: ranks 1 and 2 have the same GROUP_RANK=0 and "
                                         "LOCAL_RANK=1. "));
    }
  }
}

TEST_F(Rendezvous, LocalRanksMayHaveAnyOrderOnANode) {
  for (const auto& backend : test::backends()) {
    const auto ends = run_on_nodes({{0, 0, 3}, {0, 2, 3}, {0, 1, 3}}, [&] {
      const World world = init_process_group({.backend = backend, .timeout = 2 * kLate});
      barrier();
      return fmt::format("{} {} {}", get_node_rank(), get_local_rank(), get_local_world_size());
    });
    EXPECT_EQ(ends[0].report, "0 0 3");
    EXPECT_EQ(ends[1].report, "0 2 3");
    EXPECT_EQ(ends[2].report, "0 1 3");
  }
}

TEST_F(Rendezvous, VariablesThatOneRankLacksCountForNone) {
  for (const auto& backend : test::backends()) {
    const auto ends = run_on_nodes({{0, 0, 2}, {1, 0, 2}, {0, 1, 2}}, [&] {
      if (::getenv("RANK") == std::string("2")) ::unsetenv("LOCAL_RANK");
      const World world = init_process_group({.backend = backend, .timeout = 2 * kLate});
      barrier();
      return fmt::format("{} {} {}", get_node_rank(), get_local_rank(), get_local_world_size());
    });
    for (std::size_t rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(ends[rank].report, fmt::format("0 {} 3", rank));
    }
  }
}

TEST_F(Rendezvous, RanksWithoutVariablesAreOnTheirMachine) {
  for (const auto& backend : test::backends()) {
    const auto ends = test::run_torch_ranks(3, backend, [](const RankContext& context) {
      const World world = init_process_group(context.init);
      return fmt::format("{} {} {}", get_node_rank(), get_local_rank(), get_local_world_size());
    });
    for (std::size_t rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(ends[rank].report, fmt::format("0 {} 3", rank));
    }
  }
}

TEST_F(Rendezvous, PlaceThatPacelineRunDidNotGiveIsRefused) {
  const base::UniqueFd memory(::memfd_create("store", 0));
  const base::UniqueFd link(::dup(memory.get()));
  EXPECT_THAT(failure_alone({}, {{"RANK", "1"},
                                 {"WORLD_SIZE", "2"},
                                 {"LOCAL_RANK", "0"},
                                 {"PACELINE_BOOTSTRAP_SOCKETS", std::to_string(link.get())},
                                 {"PACELINE_STORE_FD", std::to_string(memory.get())}}),
              StartsWith("UsageError: rank 1 of 2 has GROUP_RANK=0, LOCAL_RANK=0, "
                         "LOCAL_WORLD_SIZE=2, but `paceline run` started it with GROUP_RANK=0, "
                         "LOCAL_RANK=1, LOCAL_WORLD_SIZE=2"));
}

using Variables = std::map<std::string, std::string>;

std::string plan_of(const Variables& variables, const InitOptions& options = {},
                    bool first = true) {
  const auto environment = base::parse_environment([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
  try {
    const auto plan = distributed::plan_rendezvous(options, environment, first);
    using Means = distributed::Plan::Means;
    return fmt::format("{} of {} {}", plan.rank, plan.size,
                       plan.means == Means::alone       ? "alone"
                       : plan.means == Means::inherited ? "inherited"
                                                        : "elsewhere");
  } catch (const UsageError& error) {
    return error.what();
  }
}

TEST(Plan, RejectsProcessesOfOtherLaunchers) {
  const struct {
    Variables variables;
    std::string found;
    std::string mapping;
  } refused[] = {
      {{{"OMPI_COMM_WORLD_SIZE", "2"},
        {"OMPI_COMM_WORLD_RANK", "1"},
        {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
        {"PMIX_RANK", "1"}},
       "(OMPI_COMM_WORLD_SIZE=2, OMPI_COMM_WORLD_RANK=1)",
       "RANK=$OMPI_COMM_WORLD_RANK, WORLD_SIZE=$OMPI_COMM_WORLD_SIZE, "
       "LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK, MASTER_ADDR="},
      {{{"PMI_SIZE", "4"}, {"PMI_RANK", "0"}, {"MPI_LOCALRANKID", "0"}},
       "(PMI_SIZE=4, PMI_RANK=0)",
       "RANK=$PMI_RANK, WORLD_SIZE=$PMI_SIZE, LOCAL_RANK=$MPI_LOCALRANKID"},
      {{{"SLURM_STEP_ID", "0"},
        {"SLURM_STEP_NUM_TASKS", "8"},
        {"SLURM_NTASKS", "8"},
        {"SLURM_PROCID", "3"}},
       "(SLURM_STEP_NUM_TASKS=8, SLURM_PROCID=3)",
       "RANK=$SLURM_PROCID, WORLD_SIZE=$SLURM_STEP_NUM_TASKS, LOCAL_RANK=$SLURM_LOCALID"},
      {{{"SLURM_STEP_ID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}},
       "(SLURM_NTASKS=8, SLURM_PROCID=0)",
       "WORLD_SIZE=$SLURM_NTASKS"},
      {{{"PMIX_RANK", "0"}}, "(PMIX_RANK=0)", "RANK=$PMIX_RANK"},
  };
  for (const auto& one : refused) {
    EXPECT_THAT(plan_of(one.variables),
                AllOf(HasSubstr("one of several processes " + one.found), HasSubstr(one.mapping),
                      HasSubstr("paceline run"), HasSubstr("{.world_size = 1, .rank = 0}")));
    EXPECT_EQ(plan_of(one.variables, {.world_size = 1, .rank = 0}), "0 of 1 alone");
    Variables mapped = one.variables;
    mapped.merge(Variables{{"RANK", "1"},
                           {"WORLD_SIZE", "2"},
                           {"MASTER_ADDR", "127.0.0.1"},
                           {"MASTER_PORT", "29500"}});
    EXPECT_EQ(plan_of(mapped), "1 of 2 elsewhere");
  }
}

TEST(Plan, AcceptsASingleProcessOfAnotherLauncher) {
  const Variables alone[] = {
      {},
      {{"OMPI_COMM_WORLD_SIZE", "1"}, {"OMPI_COMM_WORLD_RANK", "0"}, {"PMIX_RANK", "0"}},
      {{"PMI_SIZE", "1"}, {"PMI_RANK", "0"}},
      // A script of sbatch, in which no step has begun; and the shell of salloc.
      {{"SLURM_NTASKS", "8"}, {"SLURM_PROCID", "0"}, {"SLURM_JOB_ID", "7"}},
      {{"SLURM_NTASKS", "8"}, {"SLURM_STEP_ID", "4294967290"}, {"SLURM_STEP_NUM_TASKS", "1"}},
      // mpirun has one process on each of its nodes, on which srun started its daemons.
      {{"OMPI_COMM_WORLD_SIZE", "1"}, {"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}},
  };
  for (const Variables& variables : alone) EXPECT_EQ(plan_of(variables), "0 of 1 alone");
}

TEST(Plan, WorldsOfMoreRanksThanErrorsCanNameAreRefused) {
  EXPECT_EQ(plan_of({}, {.init_method = "file:///x", .world_size = 1024, .rank = 1023}),
            "1023 of 1024 elsewhere");
  EXPECT_EQ(plan_of({}, {.init_method = "file:///x", .world_size = 1025, .rank = 0}),
            "a world of 1025 ranks: 1 to 1024 are allowed");
}

TEST(Plan, RejectsRanksThatPacelineRunDidNotStart) {
  const Variables launched{{"RANK", "1"},
                           {"WORLD_SIZE", "2"},
                           {"PACELINE_BOOTSTRAP_SOCKETS", "5"},
                           {"PACELINE_STORE_FD", "6"}};
  EXPECT_EQ(plan_of(launched), "1 of 2 inherited");
  EXPECT_EQ(plan_of(launched, {.world_size = 2, .rank = 1}), "1 of 2 inherited");
  EXPECT_EQ(plan_of(launched, {.world_size = 1, .rank = 0}), "0 of 1 alone");
  for (const auto& [options, asked] : std::vector<std::pair<InitOptions, std::string>>{
           {{.world_size = 3}, "rank 1 of 3"}, {{.world_size = 2, .rank = 0}, "rank 0 of 2"}}) {
    EXPECT_THAT(plan_of(launched, options),
                AllOf(HasSubstr("was asked for " + asked),
                      HasSubstr("started this process as rank 1 of 2 (RANK, WORLD_SIZE)")));
  }
  // Survivors meet again in the store, with ranks of their own.
  EXPECT_EQ(plan_of(launched, {.world_size = 3}, false), "1 of 3 inherited");
}

}  // namespace
}  // namespace paceline
