#include "base/wait_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <thread>

#include "support/log_lines.h"

namespace paceline::base {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::MatchesRegex;
using ::testing::SizeIs;

// Checks until `lines` have been written.
void check_until(WaitReport& report, const test::LogLines& log, std::size_t lines) {
  EXPECT_TRUE(test::eventually([&] {
    report.check([](const std::string& waited, auto) -> std::optional<WaitReport::Text> {
      return WaitReport::Text{"waited " + waited, "a wait"};
    });
    return log.all().size() >= lines;
  }));
}

TEST(WaitReport, ReportsALongWaitAndItsEnd) {
  const test::LogLines log(100ms);
  {
    WaitReport report;
    check_until(report, log, 1);
  }
  EXPECT_THAT(log.all(), ElementsAre(MatchesRegex("waited [0-9.]+ s"),
                                     MatchesRegex("a wait went on after [0-9.]+ s")));
}

TEST(WaitReport, IntervalsGrow) {
  const test::LogLines log(20ms);
  WaitReport report;
  const auto begin = WaitReport::Clock::now();
  for (const int due : {1, 6, 30, 60}) {
    check_until(report, log, log.all().size() + 1);
    EXPECT_GE(WaitReport::Clock::now() - begin, due * 20ms);
  }
}

TEST(WaitReport, ReportsOnceWhatCameDueWhileNobodyChecked) {
  const test::LogLines log(100ms);
  WaitReport report;
  EXPECT_LE(report.next_check(Deadline::after(1min)).budget(), 100ms);  // starts the clock
  const auto begin = WaitReport::Clock::now();
  std::this_thread::sleep_for(700ms);  // the input of this test: 100 and 600 ms have passed
  check_until(report, log, 1);
  EXPECT_THAT(log.all(), SizeIs(1));
  const auto left = report.next_check(Deadline::after(1min)).budget();
  EXPECT_TRUE(left > 0ms || WaitReport::Clock::now() - begin >= 2900ms);
}

TEST(WaitReport, IsSilentAboutAShortWait) {
  const test::LogLines log(1min);
  {
    WaitReport report;
    report.check([](const std::string&, auto) -> std::optional<WaitReport::Text> {
      ADD_FAILURE() << "not due";
      return std::nullopt;
    });
  }
  EXPECT_THAT(log.all(), IsEmpty());
}

TEST(WaitReport, DoesNotSayThatAFailedWaitWentOn) {
  const test::LogLines log(1ms);
  EXPECT_THROW(
      {
        WaitReport report;
        check_until(report, log, 1);
        throw std::runtime_error("failed");
      },
      std::runtime_error);
  {
    WaitReport report;
    check_until(report, log, 2);
    report.abandon();
  }
  EXPECT_THAT(log.all(), SizeIs(2));
}

TEST(WaitReport, SaysNothingOfAWaitThatAnotherProcessReports) {
  const test::LogLines log(1ms);
  {
    WaitReport report;
    bool asked = false;
    EXPECT_TRUE(test::eventually([&] {
      report.check([&](const std::string&, auto since) -> std::optional<WaitReport::Text> {
        EXPECT_LE(since, WaitReport::Clock::now());
        asked = true;
        return std::nullopt;
      });
      return asked;
    }));
  }
  EXPECT_THAT(log.all(), IsEmpty());
}

}  // namespace
}  // namespace paceline::base
