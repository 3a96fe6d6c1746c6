// Where ranks run, by their launcher's variables or by their machine.

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include <paceline/collectives.h>

#include "base/unique_fd.h"
#include "distributed/rendezvous/rendezvous_fixture.h"
#include "support/eventually.h"
#include "support/log_lines.h"
#include "support/torch_ranks.h"

namespace paceline {
namespace {

using test::failure_alone;
using test::failure_to_join;
using test::kLate;
using test::Port;
using test::RankContext;
using test::Rendezvous;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// Processes of one machine that their launcher says are on several nodes: `places` has GROUP_RANK,
// LOCAL_RANK and LOCAL_WORLD_SIZE of each.
std::vector<test::RankEnd> run_on_nodes(const std::vector<std::array<int, 3>>& places,
                                        const std::function<std::string()>& body) {
  const std::string port = Port().number();
  return test::run_process_ranks(
      static_cast<int>(places.size()), [&](int rank, shm::BootstrapSockets) -> std::string {
        const auto& [node, local_rank, local_size] = places[static_cast<std::size_t>(rank)];
        test::set_variables({{"RANK", std::to_string(rank)},
                             {"WORLD_SIZE", std::to_string(places.size())},
                             {"GROUP_RANK", std::to_string(node)},
                             {"LOCAL_RANK", std::to_string(local_rank)},
                             {"LOCAL_WORLD_SIZE", std::to_string(local_size)},
                             {"MASTER_ADDR", "127.0.0.1"},
                             {"MASTER_PORT", port}});
        return body();
      });
}

// As on Debian, where the machine's own name may be 127.0.1.1. This is another way to write
// 127.0.0.1.
TEST_F(Rendezvous, RankZeroWarnsOfANameThatMayBeTheLoopbackHereOnly) {
  for (const bool is_one_machine : {false, true}) {
    const std::string port = Port().number();
    const auto ends = test::run_process_ranks(2, [&](int rank, shm::BootstrapSockets) {
      const test::LogLines log(test::kTestTimeout);
      test::set_variables({{"RANK", std::to_string(rank)},
                           {"WORLD_SIZE", "2"},
                           {"MASTER_ADDR", "0x7f000001"},
                           {"MASTER_PORT", port}});
      if (is_one_machine) {
        test::set_variables({{"LOCAL_RANK", std::to_string(rank)}, {"LOCAL_WORLD_SIZE", "2"}});
      }
      EXPECT_EQ(failure_to_join({.timeout = 2 * kLate}), "joined");
      return fmt::format("{}", fmt::join(log.all(), "\n"));
    });
    const auto warns = HasSubstr(
        "rank 0: 0x7f000001 resolves to 127.0.0.1 on this machine (/etc/hosts), where ranks on "
        "other machines cannot reach it: if there are any, use this machine's address in the "
        "network as MASTER_ADDR or in the init_method");
    EXPECT_EQ(::testing::Value(ends[0].report, warns), !is_one_machine) << ends[0].report;
    EXPECT_THAT(ends[1].report, ::testing::Not(HasSubstr("resolves to")));
  }
}

TEST_F(Rendezvous, TheDefaultBackendReachesOtherNodes) {
  const auto ends = run_on_nodes({{0, 0, 2}, {1, 0, 1}, {0, 1, 2}}, [] {
    const World world = init_process_group({.timeout = 2 * kLate});
    EXPECT_EQ(get_backend(), "paceline");
    const at::Tensor sum = at::full({1}, get_rank() + 1.0);
    all_reduce(sum);
    return fmt::format("{} {} {} {}", sum.item<double>(), get_node_rank(), get_local_rank(),
                       get_local_world_size());
  });
  EXPECT_EQ(ends[0].report, "6 0 0 2");
  EXPECT_EQ(ends[1].report, "6 1 0 1");
  EXPECT_EQ(ends[2].report, "6 0 1 2");
}

TEST_F(Rendezvous, AWorldOverGlooHasGroupsOverSharedMemory) {
  if (!is_gloo_available()) GTEST_SKIP() << "built without Gloo";
  const auto ends = run_on_nodes({{0, 0, 2}, {1, 0, 1}, {0, 1, 2}}, [] {
    const World world = init_process_group({.backend = "gloo", .timeout = 2 * kLate});
    const at::Tensor sum = at::full({1}, get_rank() + 1.0);
    all_reduce(sum);
    EXPECT_EQ(sum.item<double>(), 1 + 2 + 3);
    for (const std::vector<int>& members : {std::vector{0, 2}, {0, 1}, {0, 1, 2}}) {
      const ProcessGroup group = new_group(members, {.backend = "paceline"});
      const at::Tensor part = at::full({1}, get_rank() + 1.0);
      all_reduce(part, {.group = group});
      double expected = get_rank() + 1;
      if (group.is_member()) {
        expected = std::accumulate(members.begin(), members.end(), 0.0) + get_world_size(group);
      }
      EXPECT_EQ(part.item<double>(), expected);
    }
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
  std::array<int, 2> ends{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends.data()), 0);
  const base::UniqueFd link(ends[0]);
  const base::UniqueFd other(ends[1]);
  EXPECT_THAT(failure_alone({}, {{"RANK", "1"},
                                 {"WORLD_SIZE", "3"},
                                 {"LOCAL_RANK", "2"},
                                 {"PACELINE_BOOTSTRAP_SOCKETS", std::to_string(link.get())},
                                 {"PACELINE_STORE_FD", std::to_string(memory.get())}}),
              StartsWith("UsageError: rank 1 of 3 has GROUP_RANK=0, LOCAL_RANK=2, "
                         "LOCAL_WORLD_SIZE=3, which do not go together"));
}

TEST_F(Rendezvous, DescriptorsThatAreNotTheLaunchersStayOpen) {
  const base::UniqueFd memory(::memfd_create("store", 0));
  const base::UniqueFd file(::dup(memory.get()));
  const std::string expected = fmt::format(
      "UsageError: PACELINE_BOOTSTRAP_SOCKETS names descriptor {}, which is not one of the sockets",
      file.get());
  EXPECT_THAT(failure_alone({}, {{"RANK", "1"},
                                 {"WORLD_SIZE", "2"},
                                 {"PACELINE_BOOTSTRAP_SOCKETS", std::to_string(file.get())},
                                 {"PACELINE_STORE_FD", std::to_string(memory.get())}}),
              StartsWith(expected));
}

}  // namespace
}  // namespace paceline
