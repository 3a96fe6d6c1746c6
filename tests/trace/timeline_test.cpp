#include <gmock/gmock.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <paceline/error.h>
#include <paceline/log.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/cores.h"
#include "report/timelines/reader.h"
#include "support/eventually.h"
#include "support/temporary_directory.h"
#include "support/thoroughness.h"
#include "trace/format.h"
#include "trace/timeline.h"
#include "trace/trace_file.h"

namespace paceline::trace {
namespace {

using test::eventually;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using ::testing::ThrowsMessage;

std::string content_of(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

Span span_of(std::uint64_t step, Kind kind = Kind::step) {
  const Clock::time_point begin(std::chrono::nanoseconds(1000 * step + 7));
  return {.kind = kind,
          .model = 3,
          .step = step,
          .begin = begin,
          .end = begin + std::chrono::nanoseconds(1001)};
}

// Of this thread, in microseconds.
std::int64_t cpu_time() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec * 1'000'000 + time.tv_nsec / 1000;
}

class TimelineTest : public ::testing::Test {
 protected:
  void TearDown() override {
    Timeline::stop();
    set_log_callback({});
  }
  const std::filesystem::path& directory() const { return directory_.path(); }
  std::filesystem::path file(int rank) const {
    return directory() / ("rank" + std::to_string(rank) + ".json");
  }
  auto written(const char* text) const {
    return [this, text] { return content_of(file(0)).find(text) != std::string::npos; };
  }
  // What is logged from here on.
  const std::vector<std::string>& logged() {
    set_log_callback([this](LogLevel, std::string_view text) { logged_.emplace_back(text); });
    return logged_;
  }

 private:
  test::TemporaryDirectory directory_;
  std::vector<std::string> logged_;
};

TEST_F(TimelineTest, RecordedSpansRoundTrip) {
  EXPECT_EQ(Timeline::current(), nullptr);
  Timeline::start(directory() / "new" / "one", 2, 4);
  Timeline* const timeline = Timeline::current();
  ASSERT_NE(timeline, nullptr);
  Span wait = span_of(5, Kind::wait);
  wait.bucket = 6;
  wait.peer = 1;
  timeline->record(span_of(5));
  timeline->record(wait);
  const std::string hostile = "a\"b\\c\n</script>\x01 \xc3\xa9";
  timeline->describe_bucket(3, 6, 1234, hostile);
  timeline->describe_reductions(3, {.latency = 0.75, .rate = 8192.5});
  Timeline::stop();
  EXPECT_EQ(Timeline::current(), nullptr);
  timeline->record(span_of(6));

  const auto path = directory() / "new" / "one" / "rank2.json";
  const report::RankTrace trace = report::read_timeline(path);
  EXPECT_EQ(trace.rank, 2);
  EXPECT_EQ(trace.size, 4);
  EXPECT_FALSE(trace.truncated);
  EXPECT_EQ(trace.foreign, 0U);
  ASSERT_THAT(trace.spans, SizeIs(2));
  EXPECT_EQ(trace.spans[0].begin.time_since_epoch().count(), 5007);
  EXPECT_EQ(trace.spans[0].end.time_since_epoch().count(), 6008);
  EXPECT_EQ(trace.spans[0].peer, -1);
  EXPECT_EQ(trace.spans[1].kind, Kind::wait);
  EXPECT_EQ(trace.spans[1].model, 3U);
  EXPECT_EQ(trace.spans[1].bucket, 6);
  EXPECT_EQ(trace.spans[1].peer, 1);
  const report::BucketInfo& bucket = trace.buckets.at({3, 6});
  EXPECT_EQ(bucket.bytes, 1234U);
  EXPECT_EQ(bucket.parameters, hostile);
  EXPECT_EQ(trace.reductions.at(3).latency, 0.75);
  EXPECT_EQ(trace.reductions.at(3).rate, 8192.5);
}

TEST_F(TimelineTest, GivesADeviceRowsOfItsOwn) {
  Timeline::start(directory(), 0, 1);
  for (const Kind kind : {Kind::forward, Kind::device_forward, Kind::device_backward}) {
    Timeline::current()->record(span_of(5, kind));
  }
  Span bucket = span_of(5, Kind::device_bucket);
  bucket.bucket = 2;
  Timeline::current()->record(bucket);
  Timeline::stop();
  const report::RankTrace trace = report::read_timeline(file(0));
  ASSERT_THAT(trace.spans, SizeIs(1));
  ASSERT_THAT(trace.device_spans, SizeIs(3));
  EXPECT_EQ(trace.device_spans[1].kind, Kind::device_backward);
  EXPECT_EQ(trace.device_spans[2].bucket, 2);
  EXPECT_EQ(trace.foreign, 0U);
  std::vector<int> rows;
  for (const auto& event : nlohmann::json::parse(content_of(file(0)))) {
    if (event["ph"] == "X") rows.push_back(event["tid"]);
    if (event["name"] == "thread_name") {
      EXPECT_EQ(event["args"]["name"],
                event["tid"] == 300000 ? "model 3" : "model 3 on its device");
    }
  }
  EXPECT_THAT(rows, ElementsAre(300000, 350000, 350000, 350003));
}

// Of the thread that samples first, at both ends of a step, but of no more than one step that
// begins in a millisecond.
TEST_F(TimelineTest, SamplesTheTrainingThread) {
  Timeline::start(directory(), 0, 1);
  Timeline* const timeline = Timeline::current();
  const auto begin = Clock::now();
  const auto step = [&] {
    timeline->sample_thread(Timeline::Moment::begin);
    timeline->sample_thread(Timeline::Moment::end);
  };
  const auto compute = [](std::int64_t microseconds) {
    for (const auto first = cpu_time(); cpu_time() < first + microseconds;) continue;
  };
  step();
  compute(2000);
  std::thread(step).join();  // late enough, but another thread
  for (const auto first = cpu_time(); cpu_time() < first + 10'000;) step();
  const auto end = Clock::now();
  Timeline::stop();
  step();
  const auto samples = report::read_timeline(file(0)).thread;
  ASSERT_GE(samples.size(), 4U);
  EXPECT_EQ(samples.size() % 2, 0U);
  EXPECT_GE(samples[2].cpu - samples[0].cpu, 1900);  // the other thread's would be less
  // Begins are taken a little after the clock is read.
  for (std::size_t i = 2; i < samples.size(); i += 2) {
    EXPECT_GE(samples[i].at - samples[i - 2].at, std::chrono::microseconds(500));
  }
  for (std::size_t i = 1; i < samples.size(); ++i) {
    EXPECT_GE(samples[i].cpu, samples[i - 1].cpu);
    EXPECT_GE(samples[i].queued, samples[i - 1].queued);
  }
  // Always computing, so that it runs or waits for a core.
  const auto used = samples.back().cpu - samples.front().cpu;
  const auto queued = samples.back().queued - samples.front().queued;
  EXPECT_GT(used, 0);
  EXPECT_GE(samples.front().at, begin);
  EXPECT_LE(samples.back().at, end);
  EXPECT_LE(used + queued,
            std::chrono::ceil<std::chrono::microseconds>(end - begin).count() + 1000);
}

TEST_F(TimelineTest, AStoppedTimelineHoldsNoDescriptors) {
  const auto open = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                         std::filesystem::directory_iterator());
  };
  const auto before = open();
  for (int rank = 0; rank < 3; ++rank) {
    Timeline::start(directory(), rank, 3);
    Timeline::current()->sample_thread(Timeline::Moment::begin);
    EXPECT_GT(open(), before);
  }
  Timeline::stop();
  EXPECT_EQ(open(), before);
}

// As viewers want it: one JSON array, every event with a process, and names for them.
TEST_F(TimelineTest, WritesTheTraceEventFormat) {
  Timeline::start(directory(), 1, 2);
  Timeline::current()->record(span_of(5));
  Timeline::stop();
  const auto events = nlohmann::json::parse(content_of(file(1)));
  ASSERT_TRUE(events.is_array());
  EXPECT_EQ(events[0],
            nlohmann::json::parse(
                R"({"name":"process_name","ph":"M","pid":1,"tid":0,"args":{"name":"rank 1"}})"));
  EXPECT_EQ(events.back(),
            nlohmann::json::parse(R"({"name":"step","cat":"step","ph":"X","pid":1,"tid":300000,
              "ts":5.007,"dur":1.001,"args":{"model":3,"step":5}})"));
}

TEST_F(TimelineTest, WritesNothingWithoutTheVariable) {
  Timeline::start(0, 1);
  EXPECT_EQ(Timeline::current(), nullptr);
}

TEST_F(TimelineTest, NamesADirectoryThatCannotBeMade) {
  std::ofstream(directory() / "taken") << "a file";
  EXPECT_THAT([&] { Timeline::start(directory() / "taken" / "below", 0, 1); },
              ThrowsMessage<UsageError>(
                  AllOf(HasSubstr("PACELINE_TIMELINE="), HasSubstr("taken/below: cannot create"))));
  std::filesystem::create_directory(file(7));
  EXPECT_THAT([&] { Timeline::start(directory(), 7, 8); },
              ThrowsMessage<UsageError>(AllOf(HasSubstr("PACELINE_TIMELINE="),
                                              HasSubstr("rank7.json"), HasSubstr("EISDIR"))));
  EXPECT_EQ(Timeline::current(), nullptr);
}

TEST_F(TimelineTest, ThreadsRecordConcurrently) {
  Timeline::start(directory(), 0, 1);
  constexpr std::uint64_t kEach = 4000;
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([=] {
      for (std::uint64_t i = 0; i < kEach; ++i) Timeline::current()->record(span_of(t * kEach + i));
    });
  }
  for (std::thread& thread : threads) thread.join();
  Timeline::stop();
  const report::RankTrace trace = report::read_timeline(file(0));
  EXPECT_EQ(trace.spans.size() + trace.dropped, 4 * kEach);
  EXPECT_EQ(trace.dropped, 0U);  // there is room for that many
}

TEST_F(TimelineTest, CountsDroppedSpans) {
  if (test::kSanitized) GTEST_SKIP() << "a sanitizer takes minutes to read so many spans";
  Timeline::start(directory(), 0, 1);
  constexpr std::uint64_t kMany = 600000;
  for (std::uint64_t i = 0; i < kMany; ++i) Timeline::current()->record(span_of(i));
  Timeline::stop();
  const report::RankTrace trace = report::read_timeline(file(0));
  EXPECT_EQ(trace.spans.size() + trace.dropped, kMany);
  EXPECT_GT(trace.dropped, 0U);
  EXPECT_GE(trace.spans.size(), 500000U);
}

TEST_F(TimelineTest, StopsAtTheFileSizeLimit) {
  const auto& log = logged();
  TraceFile out(file(0), 0, 1 << 20);
  out.write(
      ",\n{\"name\":\"paceline_job\",\"ph\":\"M\",\"args\":{\"version\":1,\"rank\":0,\"size\":1}}");
  const std::vector<Span> spans(20000, span_of(1));
  out.write(spans);
  out.write(spans);
  out.close();
  EXPECT_LT(std::filesystem::file_size(file(0)), (1U << 20) + (1U << 17));
  const report::RankTrace trace = report::read_timeline(file(0));
  EXPECT_TRUE(trace.full);
  EXPECT_FALSE(trace.truncated);
  EXPECT_GT(trace.spans.size(), 5000U);
  EXPECT_THAT(log, ElementsAre(HasSubstr("reached its limit of 1 MiB")));
}

// The directory's file leads to a device that is always full.
TEST_F(TimelineTest, AFullDiskIsReportedOnce) {
  const auto& log = logged();
  std::filesystem::create_symlink("/dev/full", file(0));
  Timeline::start(directory(), 0, 1);
  for (std::uint64_t i = 0; i < 20000; ++i) Timeline::current()->record(span_of(i));
  Timeline::stop();
  EXPECT_THAT(log, ElementsAre(AllOf(HasSubstr("cannot write the timeline"), HasSubstr("ENOSPC"),
                                     HasSubstr("it ends here"))));
}

// Returns how `child` ended, which runs in a forked process.
int end_of_child(const std::function<void()>& child) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    child();
    ::_exit(0);
  }
  int status = -1;
  ::waitpid(pid, &status, 0);
  return status;
}

TEST_F(TimelineTest, FileSizeLimitOfTheProcessDoesNotKillIt) {
  const int status = end_of_child([&] {
    const auto& log = logged();
    const rlimit limit{100000, 100000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    Timeline::start(directory(), 0, 1);
    for (std::uint64_t i = 0; i < 16000; ++i) Timeline::current()->record(span_of(i));
    Timeline::stop();
    ::_exit(log.size() == 1 && log[0].find("EFBIG") != std::string::npos ? 42 : 1);
  });
  ASSERT_TRUE(WIFEXITED(status)) << status;
  EXPECT_EQ(WEXITSTATUS(status), 42);
  const report::RankTrace trace = report::read_timeline(file(0));
  EXPECT_TRUE(trace.truncated);
  EXPECT_GT(trace.spans.size(), 500U);
}

TEST_F(TimelineTest, AForkedChildWritesNothing) {
  Timeline::start(directory(), 0, 1);
  // The writer is idle then. ASan's child of a process of which a thread allocates may hang.
  ASSERT_TRUE(eventually(written("paceline_job")));
  Timeline* const parents = Timeline::current();
  for (std::uint64_t i = 0; i < 10; ++i) parents->record(span_of(i));
  const int status = end_of_child([&] {
    if (Timeline::current() != nullptr) ::_exit(1);
    parents->record(span_of(1000));
    parents->describe_bucket(0, 0, 1, "child");
    Timeline::stop();
    std::exit(0);  // as a child might, with all that was registered for it
  });
  EXPECT_EQ(status, 0);
  parents->record(span_of(10));
  Timeline::stop();
  const report::RankTrace trace = report::read_timeline(file(0));
  EXPECT_THAT(trace.spans, SizeIs(11));
  EXPECT_TRUE(trace.buckets.empty());
  EXPECT_FALSE(trace.truncated);
}

TEST_F(TimelineTest, ExitWritesRemainingSpans) {
  EXPECT_EQ(end_of_child([&] {
              Timeline::start(directory(), 0, 1);
              Timeline::current()->record(span_of(1));
              std::exit(0);
            }),
            0);
  const report::RankTrace trace = report::read_timeline(file(0));
  EXPECT_THAT(trace.spans, SizeIs(1));
  EXPECT_FALSE(trace.truncated);
}

TEST_F(TimelineTest, KilledRankLeavesAReadableFile) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    Timeline::start(directory(), 0, 1);
    for (std::uint64_t i = 0;; ++i) {
      Timeline::current()->record(span_of(i));
      // Steps have pauses too. Without any, the writer may never get the lock on a busy machine.
      std::this_thread::sleep_for(std::chrono::microseconds(10));
    }
  }
  const bool enough = eventually([&] {
    std::error_code none;
    return std::filesystem::file_size(file(0), none) > 300000 && !none;
  });
  ::kill(pid, SIGKILL);
  ::waitpid(pid, nullptr, 0);
  ASSERT_TRUE(enough);
  const report::RankTrace trace = report::read_timeline(file(0));
  EXPECT_TRUE(trace.truncated);
  EXPECT_GT(trace.spans.size(), 1000U);
  for (std::size_t i = 1; i < trace.spans.size(); ++i) {
    EXPECT_GT(trace.spans[i].begin, trace.spans[i - 1].begin);
  }
}

// In time, not when the buffer is full; and not only at the begin, when the rank is told.
TEST_F(TimelineTest, WritesASingleSpanWithoutMore) {
  Timeline::start(directory(), 0, 1);
  ASSERT_TRUE(eventually(written("paceline_job")));
  Timeline::current()->record(span_of(1));
  EXPECT_TRUE(eventually(written("\"cat\":\"step\"")));
}

// A process that always runs and the thread that has a timeline share a core, half of it each.
TEST_F(TimelineTest, RecordsTimeWaitingForACore) {
  if (!std::filesystem::exists("/proc/self/schedstat")) GTEST_SKIP() << "no scheduler statistics";
  cpu_set_t before;
  ASSERT_EQ(::sched_getaffinity(0, sizeof(before), &before), 0);
  const std::vector<int> cores = base::affinity();
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(cores.back(), &one);
  ASSERT_EQ(::sched_setaffinity(0, sizeof(one), &one), 0);
  const pid_t other = ::fork();
  if (other == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (std::atomic<int> turns{0};;) ++turns;
  }
  Timeline::start(directory(), 0, 1);
  for (const auto begin = cpu_time(); cpu_time() < begin + 200'000;) {
  }
  Timeline::stop();
  ::kill(other, SIGKILL);
  ::waitpid(other, nullptr, 0);
  ::sched_setaffinity(0, sizeof(before), &before);

  const report::RankTrace trace = report::read_timeline(file(0));
  EXPECT_THAT(trace.affinity, ElementsAre(cores.back()));
  ASSERT_FALSE(trace.cpu.empty());
  EXPECT_GE(trace.cpu.back().running, 190'000);
  EXPECT_GE(trace.cpu.back().used, 190'000);
  EXPECT_GE(trace.cpu.back().queued, 50'000);
  EXPECT_GE(trace.cpu.back().wall + 10'000, trace.cpu.back().running + trace.cpu.back().queued);
  // This process and the other one; the kernel counts in ticks.
  if (trace.cpu.back().busy == kUnknown) return;
  EXPECT_GE(trace.cpu.back().busy, 230'000);
  EXPECT_GE(trace.cpu.back().machine + 50'000, trace.cpu.back().busy);
}

TEST_F(TimelineTest, ReplacesTheFileOfAnEarlierRun) {
  Timeline::start(directory(), 0, 2);
  Timeline::current()->record(span_of(1));
  Timeline::start(directory(), 1, 2);
  Timeline::current()->record(span_of(2));
  Timeline::stop();
  EXPECT_EQ(report::read_timeline(file(0)).spans.at(0).step, 1U);
  EXPECT_EQ(report::read_timeline(file(1)).spans.at(0).step, 2U);
}

std::vector<Span> spans_of(std::uint64_t first, std::uint64_t count) {
  std::vector<Span> spans;
  for (std::uint64_t i = 0; i < count; ++i) spans.push_back(span_of(first + i));
  return spans;
}

// The rank 0 of two jobs. The first one goes on to write, more than the second one.
TEST_F(TimelineTest, AJobInTheSameDirectoryDoesNotSpoilTheFile) {
  TraceFile first(file(0), 0);
  first.write(job_event(0, 1));
  first.write(spans_of(1, 5));
  TraceFile second(file(0), 0);
  second.write(job_event(0, 1));
  second.write(spans_of(101, 5));
  first.write(spans_of(6, 500));
  second.write(spans_of(106, 5));
  second.close();
  first.close();
  const report::RankTrace trace = report::read_timeline(file(0));
  EXPECT_EQ(trace.foreign, 0U);
  ASSERT_THAT(trace.spans, SizeIs(10));
  EXPECT_EQ(trace.spans.front().step, 101U);
  EXPECT_EQ(trace.spans.back().step, 110U);
}

// A symbolic link is no file of an earlier run.
TEST_F(TimelineTest, WritesIntoTheTargetOfALink) {
  const auto target = directory() / "elsewhere.json";
  std::ofstream(target) << "old";
  std::filesystem::create_symlink(target, file(0));
  Timeline::start(directory(), 0, 1);
  Timeline::current()->record(span_of(1));
  Timeline::stop();
  EXPECT_TRUE(std::filesystem::is_symlink(file(0)));
  EXPECT_THAT(report::read_timeline(target).spans, SizeIs(1));
}

}  // namespace
}  // namespace paceline::trace
