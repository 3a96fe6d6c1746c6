#include <gmock/gmock.h>
#include <sys/stat.h>

#include <paceline/error.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <string>

#include "report/analysis/analysis.h"
#include "report/analysis/diagnosis.h"
#include "report/timelines/job.h"
#include "report/timelines/reader.h"
#include "support/made_timelines.h"
#include "support/temporary_directory.h"
#include "support/thoroughness.h"

namespace paceline::report {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using ::testing::ThrowsMessage;

constexpr const char* kHead =
    R"([{"name":"paceline_job","ph":"M","pid":1,"args":{"version":1,"rank":1,"size":2,"cores":3,)"
    R"("started":1700000000000000,"boot":"b"}})";
constexpr const char* kWait =
    R"({"name":"wait","cat":"wait","ph":"X","pid":1,"tid":0,"ts":3600000000.125,"dur":12.5,)"
    R"("args":{"model":2,"step":9,"bucket":4,"peer":0}})";

RankTrace parse(const std::string& text) {
  return parse_timeline(text, "a/file");
}

std::string whole() {
  return std::string(kHead) + ",\n" + kWait + ",\n" + kWait + "]";
}

void expect_corrupt(const std::string& text, const std::string& reason) {
  EXPECT_THAT([&] { parse(text); },
              ThrowsMessage<CorruptFile>(
                  AllOf(StartsWith("a/file: "), HasSubstr("at byte "), HasSubstr(reason))));
}

// A terminal obeys an escape, and U+009B, which is one in two bytes.
TEST(TraceReader, QuotesNoControlCharacters) {
  expect_corrupt("[\"\x1b[2J\"]", "<U+001B>");
  expect_corrupt("[\x7f]", "last read '[\\x7f'");
  expect_corrupt(
      "[\"\xc2\x9b"
      "2J\\x\"]",
      "\\u009b2J");
  expect_corrupt(
      "[\"\x9b"
      "2J\"]",
      "\\x9b");
}

TEST(TraceReader, ReadsEvents) {
  const RankTrace trace = parse(whole());
  EXPECT_EQ(trace.rank, 1);
  EXPECT_EQ(trace.size, 2);
  EXPECT_EQ(trace.cores, 3);
  EXPECT_EQ(trace.local_size, 0);
  EXPECT_THAT(trace.affinity, ::testing::IsEmpty());
  EXPECT_TRUE(trace.cpu.empty());
  EXPECT_TRUE(trace.thread.empty());
  EXPECT_EQ(trace.boot, "b");
  EXPECT_EQ(trace.started, 1700000000000000);
  EXPECT_FALSE(trace.truncated);
  ASSERT_EQ(trace.spans.size(), 2U);
  const Span& span = trace.spans[0];
  EXPECT_EQ(span.kind, Kind::wait);
  EXPECT_EQ(span.model, 2U);
  EXPECT_EQ(span.step, 9U);
  EXPECT_EQ(span.bucket, 4);
  EXPECT_EQ(span.peer, 0);
  EXPECT_EQ(span.begin.time_since_epoch().count(), 3600000000125);
  EXPECT_EQ((span.end - span.begin).count(), 12500);
}

TEST(TraceReader, ReadsTheGroupOfAModel) {
  const auto parse_with = [](const std::string& args) {
    std::string text = whole();
    return parse(text.insert(text.rfind(']'),
                             R"(,{"name":"paceline_group","ph":"M","args":{)" + args + "}}"));
  };
  const RankTrace trace = parse_with(R"("model":2,"ranks":"1-2,5")");
  EXPECT_THAT(trace.groups.at(2), ElementsAre(1, 2, 5));
  EXPECT_EQ(trace.foreign, 0U);
  for (const char* bad : {R"("model":2)", R"("ranks":"1")", R"("model":2,"ranks":"2,1")",
                          R"("model":2,"ranks":"1-65536")", R"("model":-1,"ranks":"1")"}) {
    EXPECT_EQ(parse_with(bad).foreign, 1U) << bad;
    EXPECT_TRUE(parse_with(bad).groups.empty()) << bad;
  }
  // What a file may make its reader keep is bounded.
  std::string many = kHead;
  for (int model = 0; model < 1000; ++model) {
    many += R"(,{"name":"paceline_group","ph":"M","args":{"ranks":"0-65535","model":)" +
            std::to_string(model) + "}}";
  }
  EXPECT_EQ(parse(many + "]").groups.size(), (1 << 22) / 65536);
}

TEST(TraceReader, ReadsTheCoresOfARank) {
  const auto parse_with = [](const std::string& affinity) {
    std::string text = whole();
    text.replace(text.find("\"cores\":3"), 9,
                 R"("cores":3,"local_size":2,"affinity":")" + affinity + "\"");
    return parse(text);
  };
  EXPECT_EQ(parse_with("0-2,8").local_size, 2);
  EXPECT_THAT(parse_with("0-2,8").affinity, ElementsAre(0, 1, 2, 8));
  EXPECT_THAT(parse_with("5").affinity, ElementsAre(5));
  const RankTrace twice = parse(whole().insert(whole().rfind(']'), "," + std::string(kHead + 1)));
  EXPECT_EQ(twice.foreign, 1U);
  for (const char* bad : {"", "-", "1-", "x", "1,,2", "-1", "0-99999999", "0x1", "1 2", "3-1",
                          "0-3,2", "0-65535,0-65535"}) {
    EXPECT_THAT(parse_with(bad).affinity, ::testing::IsEmpty()) << bad;
  }
  const std::string cpu = R"(,{"name":"paceline_cpu","ph":"M","pid":1,"args":{"wall":4,"used":3,)";
  const RankTrace trace = parse(std::string(kHead) + cpu + R"("running":2,"queued":1}})" + cpu +
                                R"("running":5,"queued":7}})" + cpu + R"("running":-1}}])");
  ASSERT_EQ(trace.cpu.size(), 2U);
  EXPECT_EQ(trace.cpu.back().wall, 4);
  EXPECT_EQ(trace.cpu.back().used, 3);
  EXPECT_EQ(trace.cpu.back().running, 5);
  EXPECT_EQ(trace.cpu.back().queued, 7);
  EXPECT_EQ(trace.foreign, 1U);
}

TEST(TraceReader, ReadsWhatTheKernelKnows) {
  const auto parse_with = [](const std::string& name, const std::string& args) {
    return parse(std::string(kHead) + ",{\"name\":\"" + name + "\",\"ph\":\"M\",\"args\":{" + args +
                 "}}]");
  };
  const std::string cpu = R"("at":5.5,"wall":4,"used":3,"running":2,"queued":1)";
  const RankTrace some = parse_with("paceline_cpu", cpu);
  ASSERT_EQ(some.cpu.size(), 1U);
  EXPECT_EQ(some.cpu[0].at.time_since_epoch().count(), 5500);
  EXPECT_EQ(some.cpu[0].throttled, trace::kUnknown);
  EXPECT_EQ(some.cpu[0].machine, trace::kUnknown);
  const RankTrace all =
      parse_with("paceline_cpu", cpu + R"(,"periods":12,"throttled":6,"busy":7,"stolen":8,)"
                                       R"("machine":9,"cpu_pressure":10,)"
                                       R"("memory_pressure":11)");
  ASSERT_EQ(all.cpu.size(), 1U);
  EXPECT_EQ(all.cpu[0].periods, 12);
  EXPECT_EQ(all.cpu[0].throttled, 6);
  EXPECT_EQ(all.cpu[0].busy, 7);
  EXPECT_EQ(all.cpu[0].stolen, 8);
  EXPECT_EQ(all.cpu[0].machine, 9);
  EXPECT_EQ(all.cpu[0].cpu_pressure, 10);
  EXPECT_EQ(all.cpu[0].memory_pressure, 11);

  const std::string thread = R"("cpu":3,"queued":4,"preempted":5,"faults":6)";
  const RankTrace sampled = parse_with("paceline_thread", R"("at":7,)" + thread);
  ASSERT_EQ(sampled.thread.size(), 1U);
  EXPECT_EQ(sampled.thread[0].at.time_since_epoch().count(), 7000);
  EXPECT_EQ(sampled.thread[0].cpu, 3);
  EXPECT_EQ(sampled.thread[0].queued, 4);
  EXPECT_EQ(sampled.thread[0].preempted, 5);
  EXPECT_EQ(sampled.thread[0].faults, 6);
  for (const char* bad : {"", R"("at":-1,)", R"("at":1e300,)", R"("at":"1",)"}) {
    const RankTrace trace = parse_with("paceline_thread", bad + thread);
    EXPECT_TRUE(trace.thread.empty()) << bad;
    EXPECT_EQ(trace.foreign, 1U) << bad;
  }
}

TEST(TraceReader, ReadsAFileTruncatedAtAnyByte) {
  const std::string text = whole();
  const std::string head(kHead);
  const std::size_t first = head.size() + 2 + std::string(kWait).size();
  for (std::size_t size = head.size(); size < text.size(); ++size) {
    SCOPED_TRACE(size);
    const RankTrace trace = parse(text.substr(0, size));
    EXPECT_TRUE(trace.truncated);
    EXPECT_EQ(trace.spans.size(), size == text.size() - 1 ? 2U : size >= first ? 1U : 0U);
  }
  for (std::size_t size = 0; size < head.size(); ++size) {
    EXPECT_THROW(parse(text.substr(0, size)), CorruptFile) << size;
  }
}

TEST(TraceReader, RejectsFilesThatAreNotTimelines) {
  expect_corrupt("", "the file is empty");
  expect_corrupt("hello", "not a timeline");
  expect_corrupt(R"({"traceEvents":[]})", "not a timeline; expected a JSON array (at byte 0)");
  expect_corrupt("[]", "no event paceline_job");
  expect_corrupt(whole() + "x", "at byte");
  expect_corrupt(std::string(kHead) + ",\n" + std::string(8, '\0') + kWait, "at byte");
  const std::string overflow = std::string(kHead) + ",\n{\"ts\":1e999";
  expect_corrupt(overflow + "}]",
                 "the number 1e999 is too large; expected at most 2^53 (line 2, at byte " +
                     std::to_string(overflow.size()) + ")");
  expect_corrupt(whole() + "\nx", "<U+000A>x'; expected an array of events (line 4, at byte " +
                                      std::to_string(whole().size() + 2) + ")");
  std::string other = whole();
  other.replace(other.find("\"version\":1"), 11, "\"version\":2");
  expect_corrupt(other, "format version 2, expected 1: use the paceline that wrote it");
}

// kWait with `good` replaced by `bad` is invalid.
struct InvalidEvent {
  const char* name;
  std::string good;
  std::string bad;
};
const InvalidEvent kInvalidEvents[] = {
    {"HugeBegin", "3600000000.125", "1e300"},
    {"NegativeBegin", "3600000000.125", "-1"},
    {"BeginIsAString", "3600000000.125", "\"1\""},
    {"NegativeDuration", "\"dur\":12.5", "\"dur\":-3"},
    {"HugeDuration", "\"dur\":12.5", "\"dur\":1e18"},
    {"UnknownKind", "\"cat\":\"wait\"", "\"cat\":\"weight\""},
    {"NegativeStep", "\"step\":9", "\"step\":-9"},
    {"StepIsNoInteger", "\"step\":9", "\"step\":9.5"},
    {"HugeStep", "\"step\":9", "\"step\":18446744073709551615"},
    {"UnknownPhase", "\"ph\":\"X\"", "\"ph\":\"B\""},
    {"ArgumentsAreNested", "\"args\":{", "\"args\":{\"x\":{"},
    {"NoArguments", "\"args\":{", "\"arms\":{"},
};

class TraceReaderCounts : public ::testing::TestWithParam<InvalidEvent> {};
INSTANTIATE_TEST_SUITE_P(, TraceReaderCounts, ::testing::ValuesIn(kInvalidEvents),
                         [](const auto& one) { return one.param.name; });

TEST_P(TraceReaderCounts, AnInvalidEvent) {
  const auto& [name, good, bad] = GetParam();
  std::string event = kWait;
  event.replace(event.find(good), good.size(), bad);
  if (bad.ends_with("{\"x\":{")) event += '}';
  const RankTrace trace = parse(std::string(kHead) + "," + event + "]");
  EXPECT_EQ(trace.spans.size(), 0U);
  EXPECT_EQ(trace.foreign, 1U);
}

TEST(TraceReader, DeepNestingDoesNotOverflowTheStack) {
  const std::string deep(1 << 20, '[');
  EXPECT_TRUE(parse(std::string(kHead) + "," + deep).truncated);
  std::string objects(kHead);
  for (int i = 0; i < 100000; ++i) objects += i == 0 ? ",{\"args\":" : "{\"args\":";
  EXPECT_TRUE(parse(objects).truncated);
}

// Whatever the bytes: a timeline with a diagnosis, or CorruptFile.
TEST(TraceReader, ReadsOrRejectsDamagedFiles) {
  test::MadeJob job;
  job.steps = 14;
  job.queued = [](int, int step) { return 100.0 * (step % 3); };
  const test::TemporaryDirectory directory;
  test::write_timelines(directory.path(), test::make_timelines(job));
  std::ifstream file(directory.path() / "rank0.json");
  const std::string good(std::istreambuf_iterator<char>(file), {});
  const RankTrace peer = read_timeline(directory.path() / "rank1.json");
  ASSERT_EQ(parse(good).spans.size(), peer.spans.size());
  std::mt19937 random(2024);
  const std::string_view alphabet = "0123456789-.eE+\"\\{}[]:,";
  for (int round = 0; round < 400 * test::thoroughness(); ++round) {
    std::string text = good;
    for (auto edits = 1 + random() % 4; edits > 0; --edits) {
      // Digits matter most: they become other times, steps and buckets.
      const std::size_t at = random() % text.size();
      text[at] = random() % 4 == 0 ? static_cast<char>(random()) : alphabet[random() % 23];
    }
    if (random() % 4 == 0) text.resize(random() % text.size());
    try {
      EXPECT_FALSE(diagnose(analyse(merge({parse(text), peer}))).sentence.empty());
    } catch (const CorruptFile&) {  // one of the two must happen
    }
  }
}

TEST(ReadJob, ReadsADirectory) {
  const test::TemporaryDirectory directory;
  test::write_timelines(directory.path(), test::make_timelines({.ranks = 3}));
  std::ofstream(directory.path() / "rank1.json") << "[]";
  std::ofstream(directory.path() / "rank.json") << "ignored";
  std::ofstream(directory.path() / "rankx.json") << "ignored";
  const Job job = read_job(directory.path());
  EXPECT_EQ(job.ranks.size(), 2U);
  EXPECT_THAT(job.notes, ElementsAre(AllOf(HasSubstr("rank1.json: no event paceline_job"),
                                           HasSubstr("it is ignored")),
                                     HasSubstr("there is no timeline of rank 1 (of 3 ranks)")));
}

TEST(ReadJob, ReportsMissingRanks) {
  const test::TemporaryDirectory directory;
  EXPECT_THAT([&] { read_job(directory.path() / "none"); },
              ThrowsMessage<UsageError>(HasSubstr("none: No such file or directory")));
  EXPECT_THAT([&] { read_job(directory.path()); },
              ThrowsMessage<UsageError>(HasSubstr("no rank*.json in")));
  ASSERT_EQ(::mkfifo((directory.path() / "rank0.json").c_str(), 0600), 0);
  EXPECT_THAT([&] { read_job(directory.path()); },
              ThrowsMessage<Error>(HasSubstr("rank0.json is not a regular file")));
}

}  // namespace
}  // namespace paceline::report
