#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include <paceline/error.h>

#include "distributed/find_topology.h"
#include "distributed/topology.h"

namespace paceline::distributed {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

Placement by_variables(int node, int local_rank, int local_size) {
  return {Placement::Variables{node, local_rank, local_size}, "the same", ""};
}
Placement by_machine(const std::string& machine) {
  return {std::nullopt, machine, "host of " + machine};
}

// How a world is refused.
std::string refusal(const std::vector<Placement>& placements) {
  try {
    const Topology topology(placements);
    return "no error";
  } catch (const UsageError& error) {
    return error.what();
  }
}

TEST(Topology, OneNodeHasAllRanksInOrder) {
  for (const Topology& one :
       {Topology::one_node(3),
        Topology(std::vector<Placement>{by_machine("a"), by_machine("a"), by_machine("a")}),
        Topology(std::vector<Placement>{by_variables(0, 0, 3), by_variables(0, 1, 3),
                                        by_variables(0, 2, 3)})}) {
    EXPECT_EQ(one.size(), 3);
    EXPECT_EQ(one.nodes(), 1);
    EXPECT_THAT(one.ranks_on(0), ElementsAre(0, 1, 2));
    EXPECT_EQ(one.leader_of(0), 0);
    EXPECT_EQ(one.local_rank_of(2), 2);
  }
}

TEST(Topology, NodesMayDifferInSize) {
  const Topology topology(std::vector<Placement>{by_variables(0, 0, 1), by_variables(1, 0, 3),
                                                 by_variables(1, 1, 3), by_variables(1, 2, 3),
                                                 by_variables(2, 0, 2), by_variables(2, 1, 2)});
  EXPECT_EQ(topology.nodes(), 3);
  EXPECT_THAT(topology.ranks_on(0), ElementsAre(0));
  EXPECT_THAT(topology.ranks_on(1), ElementsAre(1, 2, 3));
  EXPECT_THAT(topology.ranks_on(2), ElementsAre(4, 5));
  EXPECT_EQ(topology.leader_of(2), 4);
  EXPECT_EQ(topology.local_size(1), 3);
  EXPECT_EQ(topology.node_of(3), 1);
  EXPECT_EQ(topology.local_rank_of(3), 2);
  EXPECT_STREQ(topology.source(), "GROUP_RANK");
}

TEST(Topology, CountsTheRanksOfAControlGroup) {
  std::vector<Placement> placements(5, by_machine("a"));
  for (const int rank : {1, 3}) placements[rank].cgroup = "container";
  placements[4] = by_machine("b");
  const Topology topology(placements);
  EXPECT_EQ(topology.in_cgroup_of(0), 2);
  EXPECT_EQ(topology.in_cgroup_of(3), 2);
  EXPECT_EQ(topology.in_cgroup_of(4), 1);
}

TEST(Topology, RanksMayGoRoundTheNodes) {
  constexpr int kNodes = 128;
  constexpr int kEach = 8;
  for (const bool variables : {false, true}) {
    std::vector<Placement> placements;
    for (int rank = 0; rank < kNodes * kEach; ++rank) {
      placements.push_back(variables ? by_variables(rank % kNodes, rank / kNodes, kEach)
                                     : by_machine(fmt::format("m{}", rank % kNodes)));
    }
    const Topology topology(placements);
    EXPECT_EQ(topology.size(), 1024);
    EXPECT_EQ(topology.nodes(), kNodes);
    for (int node = 0; node < kNodes; ++node) {
      ASSERT_EQ(topology.leader_of(node), node);
      ASSERT_EQ(topology.local_size(node), kEach);
      for (int local = 0; local < kEach; ++local) {
        const int rank = node + local * kNodes;
        ASSERT_EQ(topology.ranks_on(node)[static_cast<std::size_t>(local)], rank);
        ASSERT_EQ(topology.node_of(rank), node);
        ASSERT_EQ(topology.local_rank_of(rank), local);
      }
    }
  }
}

// As torchrun sets them with --virtual-local-rank.
TEST(Topology, VirtualLocalRanksAreAllZero) {
  for (const Topology& topology :
       {Topology(std::vector<Placement>{by_variables(0, 0, 3), by_variables(0, 0, 3),
                                        by_variables(0, 0, 3)}),
        Topology::one_node_of_virtual_ranks(3)}) {
    EXPECT_EQ(topology.nodes(), 1);
    EXPECT_THAT(topology.ranks_on(0), ElementsAre(0, 1, 2));
    for (const int rank : {0, 1, 2}) EXPECT_EQ(topology.local_rank_of(rank), 0);
  }
  const Topology two(std::vector<Placement>{by_variables(0, 0, 2), by_variables(0, 0, 2),
                                            by_variables(1, 0, 2), by_variables(1, 1, 2)});
  EXPECT_EQ(two.local_size(0), 2);
  EXPECT_EQ(two.local_rank_of(1), 0);
  EXPECT_EQ(two.local_rank_of(3), 1);
  // Two machines that both believe to be the first, or that have a rank too many.
  Placement elsewhere = by_variables(0, 0, 2);
  elsewhere.machine = "another";
  EXPECT_THAT(refusal({by_variables(0, 0, 2), elsewhere}),
              StartsWith("ranks 0 and 1 have the same GROUP_RANK=0 and LOCAL_RANK=0. "));
  EXPECT_THAT(refusal({by_variables(0, 0, 1), by_variables(0, 0, 1)}),
              StartsWith("ranks 0 and 1 have the same GROUP_RANK=0 and LOCAL_RANK=0. "));
}

// As an agent may deal them.
TEST(Topology, LocalRanksNeedNotFollowTheRanks) {
  const Topology topology(
      std::vector<Placement>{by_variables(1, 1, 2), by_variables(0, 0, 1), by_variables(1, 0, 2)});
  EXPECT_THAT(topology.ranks_on(1), ElementsAre(0, 2));
  EXPECT_EQ(topology.leader_of(1), 0);
  EXPECT_EQ(topology.local_rank_of(0), 1);
  EXPECT_EQ(topology.local_rank_of(2), 0);
}

TEST(Topology, MachinesAreNodesUnlessAllRanksHaveVariables) {
  const Topology topology(std::vector<Placement>{
      by_machine("b"), by_machine("a"), {Placement::Variables{0, 0, 2}, "b", "host of b"}});
  EXPECT_THAT(topology.ranks_on(0), ElementsAre(0, 2));
  EXPECT_THAT(topology.ranks_on(1), ElementsAre(1));
  EXPECT_STREQ(topology.source(), "machine");
  const std::vector<int> ranks{0, 1, 2};
  EXPECT_EQ(topology.describe(ranks),
            "ranks 0 and 2 on node 0 (host of b), rank 1 on node 1 (host of a)");
  EXPECT_THAT(topology.nodes_of(std::vector<int>{1, 2}), ElementsAre(0, 1));
  EXPECT_THAT(topology.nodes_of(std::vector<int>{2, 0}), ElementsAre(0));
}

TEST(Topology, ManyNodesAreCounted) {
  std::vector<Placement> placements;
  std::vector<int> ranks;
  for (int rank = 0; rank < 20; ++rank) {
    placements.push_back(by_machine(std::to_string(rank)));
    ranks.push_back(rank);
  }
  EXPECT_THAT(Topology(placements).describe(ranks),
              ::testing::EndsWith("rank 7 on node 7 (host of 7) and more on 12 other nodes"));
}

TEST(Topology, ContradictionsNameRanksAndVariables) {
  EXPECT_THAT(refusal({by_variables(0, 1, 2), by_variables(0, 1, 2)}),
              StartsWith("ranks 0 and 1 have the same GROUP_RANK=0 and LOCAL_RANK=1. "));
  EXPECT_THAT(refusal({by_variables(0, 0, 2), by_variables(0, 1, 3)}),
              StartsWith("rank 0 has LOCAL_WORLD_SIZE=2 and rank 1 has LOCAL_WORLD_SIZE=3, and "
                         "both have GROUP_RANK=0. "));
  EXPECT_THAT(refusal({by_variables(0, 0, 3), by_variables(1, 0, 1), by_variables(0, 1, 3)}),
              StartsWith("GROUP_RANK=0 belongs to ranks 0 and 2, but LOCAL_WORLD_SIZE=3 there. "));
  EXPECT_THAT(refusal({by_variables(0, 0, 1), by_variables(2, 0, 1)}),
              StartsWith("rank 1 has GROUP_RANK=2, and no rank has GROUP_RANK=1. "));
  EXPECT_THAT(refusal({by_variables(1 << 30, 0, 2), by_variables(1 << 30, 1, 2)}),
              AllOf(StartsWith("ranks 0 and 1 have GROUP_RANK=1073741824, and no rank has "
                               "GROUP_RANK=0. "),
                    HasSubstr("unset them on every rank")));
}

// What rank 2 of 3 finds, which `paceline run` has started with these variables.
std::string launched(int node, int local_rank, int local_size) {
  base::Environment environment;
  environment.node_rank = node;
  environment.local_rank = local_rank;
  environment.local_world_size = local_size;
  Plan plan;
  plan.means = Plan::Means::inherited;
  plan.rank = 2;
  plan.size = 3;
  plan.launched = true;
  try {
    const auto found = find_topology({}, "gloo", plan, environment, [](const Topology&) {});
    EXPECT_FALSE(found.exchanged);
    EXPECT_THAT(found.topology.ranks_on(0), ElementsAre(0, 1, 2));
    return fmt::format("local rank {}", found.topology.local_rank_of(2));
  } catch (const UsageError& error) {
    return error.what();
  }
}

TEST(FindTopology, HoldsRanksOfPacelineRunToWhatItSet) {
  EXPECT_EQ(launched(0, 2, 3), "local rank 2");
  EXPECT_EQ(launched(0, 0, 3), "local rank 0") << "--virtual-local-rank";
  EXPECT_EQ(launched(0, 1, 3),
            "rank 2 of 3 has GROUP_RANK=0, LOCAL_RANK=1, LOCAL_WORLD_SIZE=3, which do not go "
            "together: `paceline run` gives a rank of a job on one node GROUP_RANK=0, "
            "LOCAL_RANK=RANK and LOCAL_WORLD_SIZE=WORLD_SIZE; leave these variables as they are");
  for (const auto& text : {launched(1, 0, 3), launched(0, 0, 1), launched(0, 0, 2)}) {
    EXPECT_THAT(text, HasSubstr("leave these variables as they are"));
  }
}

TEST(Placement, SurvivesTheStore) {
  for (const Placement& one :
       {by_variables(3, 1, 4), by_machine("boot net:[1]"), Placement{std::nullopt, "m", ""},
        Placement{std::nullopt, "m", "h", {0, 3, 1023}, "cgroup:[2] /sys/fs/cgroup/a b"}}) {
    const auto read = Placement::decode(one.encode());
    ASSERT_TRUE(read);
    EXPECT_EQ(read->variables, one.variables);
    EXPECT_EQ(read->machine, one.machine);
    EXPECT_EQ(read->host, one.host);
    EXPECT_EQ(read->cpus, one.cpus);
    EXPECT_EQ(read->cgroup, one.cgroup);
  }
}

TEST(Placement, DamagedRecordsAreNothing) {
  for (const std::string damaged :
       {"", "here", "\n", "\n\nhost\n\n\n", "0 0 1\nm", "0 0 1\nm\nhost\n\n", "0 0\nm\nh\n\n\n",
        "0 1 1\nm\nh\n\n\n", "-1 0 1\nm\nh\n\n\n", "0 0 99999999999\nm\nh\n\n\n",
        "0 0 1 2\nm\nh\n\n\n", "a b c\nm\nh\n\n\n", "0 0 1\nm\nh\n0 x\n\n"}) {
    EXPECT_FALSE(Placement::decode(damaged)) << damaged;
  }
  std::mt19937 random(1);
  for (int round = 0; round < 1000; ++round) {
    std::string noise(random() % 40, '\0');
    for (char& byte : noise) byte = "0123 \n-m"[random() % 8];
    const auto read = Placement::decode(noise);
    if (!read || !read->variables) continue;
    EXPECT_GE(read->variables->node, 0);
    EXPECT_LT(read->variables->local_rank, read->variables->local_size);
  }
}

TEST(Placement, VariablesCountOnlyTogetherAndForTheLaunchersRanks) {
  base::Environment environment;
  environment.node_rank = 1;
  environment.local_rank = 2;
  EXPECT_FALSE(Placement::own(environment, true).variables);
  environment.local_world_size = 3;
  EXPECT_EQ(Placement::own(environment, true).variables, (Placement::Variables{1, 2, 3}));
  EXPECT_FALSE(Placement::own(environment, false).variables);
  EXPECT_FALSE(Placement::own(environment, false).machine.empty());
}

}  // namespace
}  // namespace paceline::distributed
