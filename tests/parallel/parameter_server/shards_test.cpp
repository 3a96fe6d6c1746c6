#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "parallel/parameter_server/shards.h"

namespace paceline::parameter_server {
namespace {

TEST(Shards, LargestParametersComeFirstAndEachServerGetsAsMuch) {
  EXPECT_EQ(assign_to_servers({1, 8, 4, 3}, 2), (std::vector<int>{1, 0, 1, 1}));
}

TEST(Shards, EmptyParametersStillReachEveryServer) {
  EXPECT_EQ(assign_to_servers({0, 0, 0}, 3), (std::vector<int>{0, 1, 2}));
}

TEST(Shards, OneServerHasAll) {
  EXPECT_EQ(assign_to_servers({5, 2, 9}, 1), (std::vector<int>{0, 0, 0}));
}

// The bound of this rule: no server has more than the mean and one largest parameter.
TEST(Shards, NoServerExceedsTheMeanByMoreThanOneParameter) {
  std::vector<std::size_t> bytes;
  for (std::size_t i = 0; i < 50; ++i) bytes.push_back(i * i % 97 * 10);
  for (int servers = 1; servers <= 7; ++servers) {
    std::vector<std::size_t> loads(static_cast<std::size_t>(servers));
    const auto assigned = assign_to_servers(bytes, servers);
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      loads.at(static_cast<std::size_t>(assigned.at(i))) += bytes[i];
    }
    const auto total = std::accumulate(bytes.begin(), bytes.end(), std::size_t{0});
    for (const std::size_t load : loads) {
      EXPECT_LE(load, total / static_cast<std::size_t>(servers) + 960);
    }
  }
}

}  // namespace
}  // namespace paceline::parameter_server
