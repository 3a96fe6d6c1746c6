#include "distributed/handle_exchange.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <future>
#include <semaphore>
#include <string>
#include <vector>

#include <paceline/error.h>

namespace paceline::distributed {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class HandleExchange : public ::testing::Test {
 protected:
  static constexpr int kSize = 3;

  std::future<HandleRound> start(int rank, const std::string& handle, std::int64_t first = 0,
                                 std::chrono::milliseconds timeout = 1min) {
    return std::async(std::launch::async, [=, this, store = store_] {
      return exchange_handles(store, rank, kSize, handle, first, base::Deadline::after(timeout),
                              [this] { lates_.release(); });
    });
  }
  static void expect(std::vector<std::future<HandleRound>> ranks, std::int64_t number,
                     const std::vector<std::string>& handles) {
    for (auto& rank : ranks) {
      const HandleRound round = rank.get();
      EXPECT_EQ(round.number, number);
      EXPECT_EQ(round.handles, handles);
    }
  }
  template <typename... Ranks>
  static std::vector<std::future<HandleRound>> all(Ranks... ranks) {
    std::vector<std::future<HandleRound>> list;
    (list.push_back(std::move(ranks)), ...);
    return list;
  }
  static std::vector<int> late(std::future<HandleRound> rank) {
    try {
      rank.get();
    } catch (const Timeout& timeout) {
      EXPECT_THAT(timeout.what(), HasSubstr("did not come to reconfigure within the timeout"));
      return timeout.ranks();
    }
    return {};
  }
  void await(const std::string& key) const { store_->get(key); }

  c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
  std::counting_semaphore<> lates_{0};
};

TEST_F(HandleExchange, SaysOnceThatRanksAreLate) {
  auto first = start(0, "a");
  auto second = start(1, "b");
  for (int rank = 0; rank < 2; ++rank) lates_.acquire();
  expect(all(std::move(first), std::move(second), start(2, "c")), 0, {"a", "b", "c"});
  EXPECT_FALSE(lates_.try_acquire());
}

TEST_F(HandleExchange, GivesTheHandlesByRank) {
  expect(all(start(0, "a"), start(1, "b"), start(2, "c")), 0, {"a", "b", "c"});
  expect(all(start(0, "d", 1), start(1, "e", 1), start(2, "f", 1)), 1, {"d", "e", "f"});
}

TEST_F(HandleExchange, ANewProcessFindsTheRound) {
  expect(all(start(0, "a"), start(1, "b"), start(2, "c")), 0, {"a", "b", "c"});
  expect(all(start(0, "d", 1), start(1, "e", 1), start(2, "f", 1)), 1, {"d", "e", "f"});
  // It knows of no round.
  expect(all(start(0, "g", 2), start(1, "new"), start(2, "h", 2)), 2, {"g", "new", "h"});
}

TEST_F(HandleExchange, ANewProcessEndsARoundThatTheOneBeforeHasBegun) {
  store_->set("0 1", "of a process that has died");
  auto first = start(0, "a");
  auto second = start(1, "new");
  await("0 end");
  expect(all(std::move(first), std::move(second), start(2, "c")), 1, {"a", "new", "c"});
}

// Its handle is of no use, as reconfigure finds out: all ranks call it, or none does.
TEST_F(HandleExchange, ACompleteRoundStaysComplete) {
  store_->set("0 1", "of a process that has died");
  expect(all(start(0, "a"), start(2, "c")), 0, {"a", "of a process that has died", "c"});
  expect(all(start(0, "d", 1), start(1, "new"), start(2, "f", 1)), 1, {"d", "new", "f"});
}

TEST_F(HandleExchange, NamesTheRanksThatDoNotCome) {
  EXPECT_THAT(late(start(0, "a", 0, 50ms)), ElementsAre(1, 2));
  // It comes again, with the same handle or with another one.
  auto second = start(1, "b");
  await("0 1");
  expect(all(start(0, "a"), std::move(second), start(2, "c")), 1, {"a", "b", "c"});
  EXPECT_THAT(late(start(2, "d", 2, 50ms)), ElementsAre(0, 1));
  expect(all(start(0, "e", 2), start(1, "f", 2), start(2, "g", 2)), 3, {"e", "f", "g"});
}

}  // namespace
}  // namespace paceline::distributed
