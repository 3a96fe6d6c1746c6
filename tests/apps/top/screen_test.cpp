// What `paceline top` shows of jobs that never ran.
#include <gmock/gmock.h>

#include <cmath>

#include "support/made_timelines.h"
#include "top/rank_window.h"
#include "top/screen.h"

namespace paceline::top {
namespace {

using test::MadeJob;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::ResultOf;
using ::testing::SizeIs;
using ::testing::StartsWith;

MadeJob job_with_slow_rank(int slow, int ranks = 3) {
  MadeJob job;
  job.ranks = ranks;
  job.buckets = 1;
  job.computing = [slow](int rank, int) { return rank == slow ? 9000.0 : 6000.0; };
  job.between = [](int, int) { return 1000.0; };
  return job;
}

View view_of(const MadeJob& made, double samples = std::nan("")) {
  View view{.job = "job abc", .recent = report::merge(test::make_timelines(made))};
  view.analysis = report::analyse(view.recent);
  view.diagnosis = report::diagnose(view.analysis);
  for (int rank = 0; rank < made.ranks; ++rank) {
    view.rates.push_back({rank, 1234, RankWindow::Rate{100, samples}});
  }
  return view;
}

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + '\n';
  return text;
}

TEST(Screen, ShowsTheJobTheRanksAndTheFinding) {
  EXPECT_EQ(
      joined(draw(view_of(job_with_slow_rank(1)), 0, 0)),
      "job abc: 3 ranks, step 1234, 100 steps/s\n"
      "rank    step compute    late   comm. between  waits for         samples/s queue\n"
      "   0 10.0 ms 6.00 ms 3.00 ms       0 1.00 ms  rank 1, bucket 0          -     -\n"
      "   1 10.0 ms 9.00 ms       0       0 1.00 ms  -                         -     -\n"
      "   2 10.0 ms 6.00 ms 3.00 ms       0 1.00 ms  rank 1, bucket 0          -     -\n"
      "Rank 1 holds this run back: it computes 9.00 ms a step, the others 6.00 ms (+50 %); the "
      "others wait for it 3.00 ms a step, 30 % of their time.\n"
      "If rank 1 were as fast as the others: 10.0 ms -> 7.00 ms a step.\n");
}

TEST(Screen, AddsUpSamples) {
  const auto lines = draw(view_of(job_with_slow_rank(1), 640), 0, 0);
  EXPECT_EQ(lines[0], "job abc: 3 ranks, step 1234, 100 steps/s, 1920 samples/s");
  EXPECT_THAT(lines[2], HasSubstr(" 640 "));
}

TEST(Screen, FitsAnySize) {
  const View view = view_of(job_with_slow_rank(17, 20));
  for (const std::size_t columns : {1U, 20U, 79U, 200U}) {
    for (const std::size_t rows : {3U, 10U, 23U, 60U}) {
      const auto lines = draw(view, columns, rows);
      EXPECT_LE(lines.size(), rows);
      EXPECT_THAT(lines, Each(ResultOf([](const auto& line) { return line.size(); },
                                       ::testing::Le(columns))));
    }
  }
}

TEST(Screen, OfManyRanksShowsTheOneAtFault) {
  const auto lines = draw(view_of(job_with_slow_rank(17, 20)), 200, 10);
  EXPECT_THAT(lines, SizeIs(10));
  EXPECT_THAT(lines[2], StartsWith("   0 "));
  EXPECT_THAT(lines[3], StartsWith("   1 "));
  EXPECT_THAT(lines[6], StartsWith("  17 "));
  EXPECT_EQ(lines[7], "  15 more ranks");
  EXPECT_THAT(lines[8], StartsWith("Rank 17 holds this run back"));
}

TEST(Screen, SentencesContinueOnTheNextLine) {
  const auto lines = draw(view_of(job_with_slow_rank(1)), 79, 23);
  EXPECT_EQ(lines[5],
            "Rank 1 holds this run back: it computes 9.00 ms a step, the others 6.00 ms (+50");
  EXPECT_EQ(lines[6], "  %); the others wait for it 3.00 ms a step, 30 % of their time.");
}

TEST(Screen, SaysThatNothingHappens) {
  View view = view_of(job_with_slow_rank(1));
  view.idle = 7;
  EXPECT_THAT(joined(draw(view, 0, 0)), HasSubstr("\nNo step has ended for 7 s.\nRank 1 holds"));
  view = view_of({.steps = 0});
  EXPECT_THAT(joined(draw(view, 0, 0)), HasSubstr("\nToo few steps to judge yet.\n"));
  view.recent.notes = {"1 of 3 ranks are on other machines"};
  EXPECT_THAT(joined(draw(view, 0, 0)), HasSubstr("\n1 of 3 ranks are on other machines.\n"));
}

}  // namespace
}  // namespace paceline::top
