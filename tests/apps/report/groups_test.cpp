// Jobs whose ranks do not all train one model together.
#include <gmock/gmock.h>

#include <vector>

#include "apps/report/diagnosis_of.h"
#include "report/analysis/machine_use.h"
#include "support/made_timelines.h"

namespace paceline::report {
namespace {

using test::MadeJob;
using test::make_timelines;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// In each group of two ranks the second one is slow, for as long as its group says. All have
// steps of 9 ms, and begin them at different times.
std::vector<RankTrace> make_pairs(const std::vector<double>& slow) {
  std::vector<RankTrace> all;
  for (std::size_t pair = 0; pair < slow.size(); ++pair) {
    MadeJob job;
    job.computing = [&](int rank, int) { return rank == 1 ? 6000 + slow[pair] : 6000.0; };
    job.between = [&](int, int) { return 3000 - slow[pair]; };
    auto traces = make_timelines(job);
    const int first = static_cast<int>(2 * pair);
    for (RankTrace& trace : traces) {
      trace.rank += first;
      trace.size = static_cast<int>(2 * slow.size());
      trace.path = "rank" + std::to_string(trace.rank) + ".json";
      trace.groups[0] = {first, first + 1};
      for (Span& span : trace.spans) {
        if (span.peer >= 0) span.peer += first;
        span.begin += std::chrono::milliseconds(3 * pair);
        span.end += std::chrono::milliseconds(3 * pair);
      }
      all.push_back(std::move(trace));
    }
  }
  return all;
}

std::vector<int> ranks_of(const std::vector<RankTrace>& traces) {
  std::vector<int> ranks;
  for (const RankTrace& trace : traces) ranks.push_back(trace.rank);
  return ranks;
}

// Each has steps of the same numbers of a model of the same number.
TEST(Groups, AreNotMixed) {
  const Job job = merge(make_pairs({0, 3000, 1000}));
  EXPECT_THAT(ranks_of(job.ranks), ElementsAre(2, 3));
  EXPECT_THAT(ranks_of(job.others), ElementsAre(0, 1, 4, 5));
  EXPECT_THAT(job.notes, ElementsAre("the judgement is about ranks 2-3, which train model 0 "
                                     "together; ranks 0-1,4-5 do not"));
  const Analysis a = analyse(job);
  EXPECT_EQ(a.size, 6);
  EXPECT_EQ(a.group_size, 2);
  EXPECT_EQ(a.local_size, 6);
  EXPECT_EQ(a.waits.size(), 1U);
  EXPECT_NEAR(a.waits.at({2, 3}), 3000, 1);
  const Diagnosis diagnosis = diagnose(a);
  EXPECT_EQ(diagnosis.finding, Finding::straggler);
  EXPECT_EQ(diagnosis.rank, 3);
}

// As with pipelines of data-parallel stages: ranks 0 and 1 wait in a second model, which they train
// with ranks 2 and 3, for those, and not for each other.
TEST(Groups, OfOtherModelsAreNotMixedEither) {
  auto traces = make_pairs({0, 0});
  for (RankTrace& trace : traces) {
    const int low = trace.rank % 2;
    trace.groups[1] = {low, low + 2};
    const auto spans = trace.spans;
    for (const Span& span : spans) {
      if (span.kind != Kind::step) continue;
      const auto length = std::chrono::microseconds(low == 0 ? 2000 : 1000);
      Span bucket{Kind::bucket, 1, span.step, 0};
      bucket.begin = trace.rank < 2 ? span.begin : span.begin + length;
      bucket.end = span.begin + length;
      trace.spans.push_back(bucket);
      Span wait = bucket;
      wait.kind = Kind::wait;
      wait.peer = low + 2;
      if (trace.rank < 2) trace.spans.push_back(wait);
    }
  }
  const Job job = merge(traces);
  ASSERT_THAT(ranks_of(job.ranks), ElementsAre(0, 1));
  const Analysis a = analyse(job);
  EXPECT_EQ(a.waits.size(), 2U);
  EXPECT_NEAR(a.waits.at({0, 2}), 2000, 1);
  EXPECT_NEAR(a.waits.at({1, 3}), 1000, 1);
}

// It may evaluate, or serve parameters.
TEST(Groups, LeaveOutARankThatDoesNotTrain) {
  auto traces = make_timelines({.ranks = 3});
  for (RankTrace& trace : traces) trace.groups[0] = {0, 1};
  traces[2].spans.clear();
  traces[2].groups.clear();
  const Job job = merge(traces);
  EXPECT_THAT(ranks_of(job.ranks), ElementsAre(0, 1));
  EXPECT_THAT(job.notes, ElementsAre(HasSubstr("ranks 0-1, which train model 0 together; rank 2 "
                                               "does not")));
  const Analysis a = analyse(job);
  EXPECT_EQ(a.steps.size(), 34U);
  EXPECT_NE(diagnose(a).finding, Finding::too_few_steps);
}

TEST(Groups, OfOneRankTrainAlone) {
  auto traces = make_timelines({});
  for (RankTrace& trace : traces) trace.groups[0] = {trace.rank};
  const Job job = merge(traces);
  EXPECT_EQ(job.group_size, 1);
  EXPECT_THAT(job.notes, Contains(HasSubstr("which trains model 0 alone; rank")));
}

// The others run on the cores of the job, too.
TEST(Groups, ShareTheMachine) {
  auto traces = make_pairs({0, 0});
  for (RankTrace& trace : traces) {
    trace.affinity = {trace.rank};
    trace.cores = 1;
    trace.local_size = 4;
  }
  const Analysis a = analyse(merge(traces));
  EXPECT_EQ(a.cores, 4);
  EXPECT_NE(diagnose(a).finding, Finding::too_many_ranks);
}

// Files of earlier versions do not name them, and a damaged one may name others.
TEST(Groups, ThatAreNotKnownAreAllRanks) {
  for (const std::vector<int>& named : {std::vector<int>{}, {5, 6}}) {
    auto traces = make_timelines({.ranks = 3});
    for (RankTrace& trace : traces) {
      if (!named.empty()) trace.groups[0] = named;
    }
    const Job job = merge(traces);
    EXPECT_EQ(job.ranks.size(), 3U);
    EXPECT_EQ(job.group_size, 3);
    EXPECT_THAT(job.notes, IsEmpty());
    EXPECT_EQ(analyse(job).steps.size(), 34U);
  }
}

// A rank of the group that is missing may be the one that all wait for.
TEST(Groups, CountRanksWithoutATimeline) {
  auto traces = make_pairs({0, 3000});
  traces.erase(traces.begin() + 3);
  const Job job = merge(traces);
  EXPECT_THAT(ranks_of(job.ranks), ElementsAre(2));
  EXPECT_EQ(job.group_size, 2);
  const Analysis a = analyse(job);
  EXPECT_FALSE(a.replayed);
  EXPECT_NEAR(a.waits.at({2, 3}), 3000, 1);  // as the rank itself says
}

}  // namespace
}  // namespace paceline::report
