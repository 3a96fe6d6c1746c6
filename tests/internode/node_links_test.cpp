#include "internode/node_links.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <latch>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "internode/nodes_of_threads.h"
#include "support/eventually.h"

namespace paceline::internode {
namespace {

using test::global_rank_of;

// The leaders of two nodes with a rank each.
class NodeLinksOfTwo : public ::testing::Test {
 protected:
  NodeLinksOfTwo() {
    auto connections = test::connect_nodes(2);
    const shm::GlobalRanks global({global_rank_of(0), global_rank_of(1)}, {0, 1});
    for (std::size_t node = 0; node < 2; ++node) {
      const int rank = static_cast<int>(node);
      shm::RegionOptions options = test::small_region(std::chrono::minutes(1));
      options.global_ranks = shm::GlobalRanks({global_rank_of(rank)}, {rank});
      regions_.push_back(test::make_thread_regions(1, options)[0]);
      links_.push_back(std::make_unique<NodeLinks>(regions_[node], NodeMap(std::vector{0, 1}, rank),
                                                   global, std::move(connections[node]),
                                                   [this](const Topic&) {
                                                     ++questions_;
                                                     if (stops_) go_on_.wait();
                                                     return shm::RankSet();
                                                   }));
    }
  }

  std::vector<std::shared_ptr<shm::Region>> regions_;
  // The next thread that is asked does not answer before this.
  std::latch go_on_{1};
  std::atomic<bool> stops_ = false;
  std::atomic<int> questions_ = 0;
  std::vector<std::unique_ptr<NodeLinks>> links_;
};

TEST_F(NodeLinksOfTwo, TellALeaderThatDoesNotAnswerUntilItDoes) {
  stops_ = true;
  const auto begin = std::chrono::steady_clock::now();
  while (links_[0]->silent_leaders().empty()) std::this_thread::yield();
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::seconds(1));
  EXPECT_EQ(links_[0]->silent_leaders(), shm::RankSet{global_rank_of(1)});
  go_on_.count_down();
  while (!links_[0]->silent_leaders().empty()) std::this_thread::yield();
}

// Its buffer would be full after minutes.
TEST_F(NodeLinksOfTwo, DoNotGoOnAskingALeaderThatDoesNotAnswer) {
  stops_ = true;
  const auto begin = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - begin < std::chrono::seconds(4)) {
    links_[0]->silent_leaders();
    std::this_thread::yield();
  }
  go_on_.count_down();
  // These messages follow the questions.
  std::latch complete(2);
  for (auto& links : links_) links->gather({0, 1}, "", [&] { complete.count_down(); });
  complete.wait();
  EXPECT_LE(questions_, 4);  // in the first second
}

TEST_F(NodeLinksOfTwo, ShowWhomRanksOfOtherNodesWaitFor) {
  const int rank = global_rank_of(0);
  const auto awaited = [&] { return regions_[1]->awaited_by(rank); };
  EXPECT_EQ(awaited(), std::nullopt);
  regions_[0]->begin_awaiting(global_rank_of(1));
  EXPECT_TRUE(test::eventually([&] { return awaited() == global_rank_of(1); }));
  regions_[0]->end_awaiting(global_rank_of(1));
  EXPECT_TRUE(test::eventually([&] { return awaited() == std::nullopt; }));
}

TEST_F(NodeLinksOfTwo, SayThatARankHasLeftBeforeTheyClose) {
  const Topic topic{0, 1};
  std::latch called(1);
  // On the thread, between two looks at the region: in this time the rank leaves.
  links_[0]->gather(topic, "a", [&] {
    called.count_down();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  });
  links_[1]->gather(topic, "b", [] {});
  called.wait();
  regions_[0]->depart();
  links_[0].reset();
  const Topic next{0, 2};
  links_[1]->gather(next, "b", [] {});
  while (links_[1]->awaited_that_left(next).empty() && !regions_[1]->failed()) {
    std::this_thread::yield();
  }
  EXPECT_EQ(links_[1]->awaited_that_left(next), shm::RankSet{global_rank_of(0)});
  EXPECT_FALSE(regions_[1]->failed()) << regions_[1]->failure().text;
}

}  // namespace
}  // namespace paceline::internode
