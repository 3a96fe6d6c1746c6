#include "internode/node_map.h"

#include <gmock/gmock.h>

#include <vector>

namespace paceline::internode {
namespace {

using ::testing::ElementsAre;

std::vector<std::vector<int>> parts_of(const std::vector<int>& nodes, int node) {
  const NodeMap map(nodes, 0);
  std::vector<std::vector<int>> parts;
  for (const NodeMap::Part& part : map.parts(node)) parts.push_back(part.ranks);
  return parts;
}

TEST(NodeMap, NumbersNodesInTheOrderOfTheirFirstRanks) {
  const NodeMap map(std::vector<int>{7, 3, 7, 5, 3, 7}, 4);
  EXPECT_EQ(map.nodes(), 3);
  EXPECT_THAT(map.ranks_on(0), ElementsAre(0, 2, 5));
  EXPECT_THAT(map.here(), ElementsAre(1, 4));
  EXPECT_EQ(map.node(), 1);
  EXPECT_EQ(map.local_rank(), 1);
  EXPECT_FALSE(map.is_leader());
  EXPECT_EQ(map.leader_of(2), 3);
  EXPECT_EQ(map.rank_at(0, 2), 5);
  EXPECT_EQ(map.lanes(), 1);
}

TEST(NodeMap, ANodeOfATreeIsOnePart) {
  EXPECT_THAT(parts_of({0, 0, 1, 1}, 1), ElementsAre(ElementsAre(2, 3)));
  EXPECT_THAT(parts_of({0, 0, 0, 0, 1, 1, 1}, 1), ElementsAre(ElementsAre(4, 5, 6)));
  EXPECT_THAT(parts_of({0, 0, 0, 1, 1, 1}, 0), ElementsAre(ElementsAre(0, 1), ElementsAre(2)));
  EXPECT_THAT(parts_of({0, 0, 0, 1, 1, 1}, 1), ElementsAre(ElementsAre(3), ElementsAre(4, 5)));
  EXPECT_THAT(parts_of({0, 1, 0, 1}, 0), ElementsAre(ElementsAre(0), ElementsAre(2)));
  EXPECT_THAT(parts_of({0, 0, 0, 0, 0}, 0), ElementsAre(ElementsAre(0, 1, 2, 3, 4)));
}

}  // namespace
}  // namespace paceline::internode
