#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include <paceline/error.h>

#include "shm/membership/failure.h"
#include "shm/membership/rank_set.h"

namespace paceline::shm {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::vector<int> sorted(const std::set<int>& ranks) {
  return {ranks.begin(), ranks.end()};
}

std::set<int> some_ranks(std::mt19937& random) {
  // At the borders of words more often than elsewhere.
  constexpr int kBorders[] = {0, 1, 62, 63, 64, 65, 127, 128, 959, 960, 1022, 1023};
  std::set<int> ranks;
  const unsigned count = random() % 40;
  for (unsigned i = 0; i < count; ++i) {
    ranks.insert(random() % 2 == 0 ? static_cast<int>(random() % kMaxWorldSize)
                                   : kBorders[random() % std::size(kBorders)]);
  }
  return ranks;
}

TEST(RankSet, IsASetOfRanksInOrder) {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    const std::set<int> a = some_ranks(random);
    const std::set<int> b = some_ranks(random);
    const RankSet x(sorted(a));
    const RankSet y(sorted(b));
    EXPECT_EQ(x.list(), sorted(a));
    EXPECT_EQ(x.count(), static_cast<int>(a.size()));
    EXPECT_EQ(x.empty(), a.empty());
    EXPECT_EQ(x == y, a == b);
    for (int rank = 0; rank < kMaxWorldSize; ++rank) {
      ASSERT_EQ(x.contains(rank), a.contains(rank)) << rank;
    }
    std::set<int> both = a;
    both.insert(b.begin(), b.end());
    EXPECT_EQ((x | y).list(), sorted(both));
    std::set<int> rest = a;
    for (const int rank : b) rest.erase(rank);
    EXPECT_EQ((x - y).list(), sorted(rest));
    EXPECT_EQ(RankSet(x.words()), x);
  }
}

TEST(RankSet, AllHoldsEveryRankOfAWorld) {
  EXPECT_TRUE(RankSet::all(0).empty());
  for (const int size : {1, 63, 64, 65, kMaxWorldSize}) {
    const RankSet all = RankSet::all(size);
    EXPECT_EQ(all.count(), size);
    EXPECT_TRUE(all.contains(size - 1));
    EXPECT_FALSE(all.contains(size));
  }
}

TEST(RankSet, LeavesOutWhatIsNoRank) {
  const RankSet ranks{-1, kMaxWorldSize, 1 << 30, 5};
  EXPECT_THAT(ranks.list(), ElementsAre(5));
  EXPECT_FALSE(ranks.contains(-1));
  EXPECT_FALSE(ranks.contains(kMaxWorldSize));
}

TEST(RankSet, IsDescribedInWords) {
  EXPECT_EQ(describe_ranks({}), "no rank");
  EXPECT_EQ(describe_ranks({1023}), "rank 1023");
  EXPECT_EQ(describe_ranks({70, 3}), "ranks 3 and 70");
  EXPECT_EQ(describe_ranks({3, 70, 1023}), "ranks 3, 70 and 1023");
  EXPECT_EQ(describe_ranks(RankSet::all(8)), "ranks 0, 1, 2, 3, 4, 5, 6 and 7");
}

RankSet ranks_from(int first, int last) {
  return RankSet::all(last + 1) - RankSet::all(first);
}

TEST(RankSet, ManyRanksAreDescribedInRangesAndCounted) {
  EXPECT_EQ(describe_ranks(RankSet::all(kMaxWorldSize)), "ranks 0-1023");
  EXPECT_EQ(describe_ranks(ranks_from(3, 70) | RankSet{80} | ranks_from(90, 99)),
            "ranks 3-70, 80 and 90-99");
  RankSet odd;
  for (int rank = 1; rank < kMaxWorldSize; rank += 2) odd.insert(rank);
  EXPECT_EQ(describe_ranks(odd), "ranks 1, 3, 5, 7, 9, 11, 13, 15 and 504 more");
  EXPECT_EQ(describe_ranks(odd | ranks_from(0, 100)),
            "ranks 0-101, 103, 105, 107, 109, 111, 113, 115 and 454 more");
}

// As it is stored in shared memory: zero at first.
std::unique_ptr<FailureRecord> empty_record() {
  return std::make_unique<FailureRecord>();
}

TEST(FailureRecord, KeepsTheFirstFailureAndItsRanks) {
  const auto record = empty_record();
  EXPECT_FALSE(record->present());
  const RankSet ranks{3, 63, 64, 70, 1023};
  record->record({FailureKind::timeout, ranks, "too late"});
  record->record({FailureKind::mismatch, {1}, "another"});
  EXPECT_TRUE(record->present());
  const Failure failure = record->read();
  EXPECT_EQ(failure.kind, FailureKind::timeout);
  EXPECT_EQ(failure.ranks, ranks);
  EXPECT_EQ(failure.text, "too late");
}

// A peer may have written anything there.
TEST(FailureRecord, CutsATextBetweenCharacters) {
  for (const std::string start : {"", "x", "xy"}) {
    FailureRecord record;
    std::string text = start;
    while (text.size() <= FailureRecord::kMaxText) text += "\u20ac";  // three bytes
    record.record({FailureKind::mismatch, {}, text});
    const std::size_t kept = (FailureRecord::kMaxText - start.size()) / 3 * 3 + start.size();
    EXPECT_EQ(record.read().text, text.substr(0, kept));
  }
}

TEST(FailureRecord, CanBeReadWhateverItHolds) {
  std::mt19937 random(2);
  const auto record = empty_record();
  for (int round = 0; round < 100; ++round) {
    auto* const bytes = reinterpret_cast<unsigned char*>(record.get());
    for (std::size_t i = 0; i < sizeof(FailureRecord); ++i) {
      bytes[i] = static_cast<unsigned char>(round == 0 ? 0xff : random());
    }
    // Complete, in most rounds: else nothing of it is read.
    constexpr std::uint32_t kComplete = 2;
    if (round % 10 != 0) std::memcpy(bytes, &kComplete, sizeof(kComplete));
    const Failure failure = record->read();
    EXPECT_LE(failure.kind, FailureKind::mismatch);
    EXPECT_LE(failure.text.size(), FailureRecord::kMaxText);
    EXPECT_THAT(failure.ranks.list(),
                Each(::testing::AllOf(::testing::Ge(0), ::testing::Lt(kMaxWorldSize))));
    EXPECT_THROW(throw_failure(failure, {"read", 1}), PeerError);
  }
}

TEST(Failure, ErrorsNameGlobalRanks) {
  const GlobalRanks global_ranks({2, 3, 70, 1023});
  const RankSet global = global_ranks.of(RankSet{1, 2, 3});
  EXPECT_THAT(global.list(), ElementsAre(3, 70, 1023));
  try {
    throw_failure({FailureKind::mismatch, global, describe_ranks(global)}, {"all_reduce", 4});
  } catch (const Mismatch& error) {
    EXPECT_THAT(error.ranks(), ElementsAre(3, 70, 1023));
    EXPECT_STREQ(error.what(), "ranks 3, 70 and 1023");
  }
}

TEST(Failure, ADamagedPeersRankIsNone) {
  const GlobalRanks global_ranks({7, 9});
  EXPECT_EQ(global_ranks.of(5000), 5000);
  EXPECT_THAT(global_ranks.of(RankSet{0}).list(), ElementsAre(7));
  EXPECT_THAT(RankSet{global_ranks.of(-3)}.list(), IsEmpty());
}

TEST(Failure, NodesAreNamedWhereThereAreSeveral) {
  const GlobalRanks global_ranks({3, 8, 9, 70}, {0, 1, 1, 5});
  EXPECT_EQ(global_ranks.describe({1}), "rank 8 on node 1");
  EXPECT_EQ(global_ranks.describe({2, 1}), "ranks 8 and 9 on node 1");
  EXPECT_EQ(global_ranks.describe({0, 1, 2, 3}),
            "rank 3 on node 0 and ranks 8 and 9 on node 1 and rank 70 on node 5");
  EXPECT_EQ(global_ranks.describe({}), "no rank");
  EXPECT_EQ(GlobalRanks({3, 8}).describe({0, 1}), "ranks 3 and 8");
  EXPECT_EQ(GlobalRanks().describe({0, 1000}), "ranks 0 and 1000");
  EXPECT_EQ(global_ranks.describe_global({9, 70}), "rank 9 on node 1 and rank 70 on node 5");
  EXPECT_EQ(global_ranks.describe_global({1, 71}), "ranks 1 and 71");
  EXPECT_EQ(global_ranks.describe_global({9, 71}), "rank 71 and rank 9 on node 1");
  EXPECT_EQ(GlobalRanks().describe_global({9, 70}), "ranks 9 and 70");
  // The world: its ranks are not listed.
  EXPECT_EQ(GlobalRanks({}, {0, 0, 1}).describe({1, 2}), "rank 1 on node 0 and rank 2 on node 1");
}

TEST(Failure, ManyNodesAreCounted) {
  std::vector<int> ranks(100);
  std::iota(ranks.begin(), ranks.end(), 0);
  EXPECT_EQ(GlobalRanks(ranks, ranks).describe(RankSet::all(100)), "ranks 0-99 on 100 nodes");
}

TEST(Failure, RanksBeyondTheLargestWorldAreRefused) {
  try {
    const GlobalRanks global_ranks({0, kMaxWorldSize});
    FAIL() << "no error";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("rank 1024 of the world: ranks from 0 to 1023"));
  }
}

}  // namespace
}  // namespace paceline::shm
