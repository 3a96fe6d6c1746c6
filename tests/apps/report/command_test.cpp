// The real `paceline report` on timelines of jobs that never ran.
#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "support/child_process.h"
#include "support/made_timelines.h"
#include "support/temporary_directory.h"

namespace paceline {
namespace {

using test::ChildProcess;
using test::MadeJob;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class Report : public ::testing::Test {
 protected:
  const std::filesystem::path& directory() const { return directory_.path(); }
  std::string path(const char* name) const { return (directory() / name).string(); }

  static ChildProcess report(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {PACELINE_COMMAND, "report"});
    return ChildProcess(std::move(arguments));
  }
  // The page for what is stored in the directory.
  std::string page() {
    auto command = report({directory().string()});
    EXPECT_EQ(command.wait(), 0) << command.err();
    return read("report.html");
  }
  std::string read(const char* name) const {
    std::ifstream file(directory() / name);
    return {std::istreambuf_iterator<char>(file), {}};
  }

 private:
  test::TemporaryDirectory directory_;
};

MadeJob slow_rank() {
  MadeJob job;
  job.ranks = 3;
  job.computing = [](int rank, int) { return rank == 1 ? 9000.0 : 6000.0; };
  job.between = [](int, int) { return 1000.0; };
  return job;
}

constexpr const char* kSlowRank =
    "Rank 1 holds this run back: it computes 9.00 ms a step, the others 6.00 ms (+50 %); the "
    "others wait for it 3.00 ms a step, 30 % of their time.";

// Every element that is opened is closed, in order.
void expect_well_formed(const std::string& page) {
  std::vector<std::string> open;
  for (std::size_t at = page.find('<'); at != page.npos; at = page.find('<', at + 1)) {
    const std::string tag = page.substr(at + 1, page.find('>', at) - at - 1);
    const std::string name = tag.substr(0, tag.find_first_of(" \n"));
    if (name == "!DOCTYPE" || name == "meta" || tag.ends_with('/')) continue;
    if (name[0] != '/') {
      open.push_back(name);
      continue;
    }
    ASSERT_FALSE(open.empty()) << at;
    ASSERT_EQ("/" + open.back(), name) << at;
    open.pop_back();
  }
  EXPECT_TRUE(open.empty());
}

TEST_F(Report, SaysTheDiagnosisAndDrawsThePage) {
  test::write_timelines(directory(), test::make_timelines(slow_rank()));
  auto command = report({directory().string()});
  EXPECT_EQ(command.wait(), 0);
  EXPECT_EQ(command.out(),
            std::string(kSlowRank) +
                "\nIf rank 1 were as fast as the others: 10.0 ms -> 7.00 ms a step.\n" +
                path("report.html") + "\n");
  EXPECT_EQ(command.err(), "");

  const std::string page = read("report.html");
  EXPECT_THAT(page, HasSubstr(std::string("<h1>") + kSlowRank + "</h1>"));
  EXPECT_THAT(page,
              HasSubstr("3 ranks, 34 steps with a median of 10.0 ms. The first 5 steps are left"));
  for (const char* part : {"A typical step", "Where the time goes", "Step time", "Overlap",
                           "Who waits for whom", "waiting for rank 1 with bucket 3: 1.50 ms"}) {
    EXPECT_THAT(page, HasSubstr(part));
  }
  EXPECT_THAT(page, Not(HasSubstr("{{")));
  expect_well_formed(page);
}

TEST_F(Report, DrawsWhatAnAcceleratorDidAndJudgesTheCpu) {
  auto traces = test::make_timelines(slow_rank());
  for (auto& trace : traces) {
    for (auto span : trace.spans) {
      if (span.kind == trace::Kind::step) span.kind = trace::Kind::device_backward;
      if (span.kind == trace::Kind::bucket) span.kind = trace::Kind::device_bucket;
      if (!trace::is_on_device(span.kind)) continue;
      span.begin += std::chrono::milliseconds(30);  // after the next steps
      span.end += std::chrono::milliseconds(30);
      trace.device_spans.push_back(span);
    }
  }
  test::write_timelines(directory(), traces);
  auto command = report({directory().string()});
  EXPECT_EQ(command.wait(), 0);
  EXPECT_THAT(command.out(), StartsWith(kSlowRank));
  const std::string page = read("report.html");
  EXPECT_THAT(page, AllOf(HasSubstr("backward on the device: 9.00 ms, from 30.0 ms to 39.0 ms"),
                          HasSubstr("bucket 3, until its average is on the device")));
  expect_well_formed(page);
}

TEST_F(Report, PageIsSelfContained) {
  test::write_timelines(directory(), test::make_timelines(slow_rank()));
  EXPECT_THAT(page(),
              Not(testing::AnyOf(HasSubstr("http://"), HasSubstr("https://"), HasSubstr("<script"),
                                 HasSubstr("<link"), HasSubstr("url("), HasSubstr("@import"))));
}

TEST_F(Report, EscapesHostileNames) {
  auto traces = test::make_timelines({.reduction = 3000});
  for (auto& trace : traces) {
    for (auto& [key, bucket] : trace.buckets) {
      bucket.parameters =
          "</title></script><script>alert('1')</script>\" onload=\"x & {{style}}\x1b[2J";
    }
  }
  test::write_timelines(directory(), traces);
  const std::string html = page();
  EXPECT_THAT(
      html, AllOf(HasSubstr("&lt;script&gt;alert(&#39;1&#39;)"), HasSubstr("{{style}}"),
                  Not(HasSubstr("<script")), Not(HasSubstr("\" onload")), Not(HasSubstr("\x1b"))));
  expect_well_formed(html);
}

struct DrawnJob {
  int ranks;
  int buckets;
};

class ReportPage : public Report, public ::testing::WithParamInterface<DrawnJob> {};
INSTANTIATE_TEST_SUITE_P(, ReportPage,
                         ::testing::Values(DrawnJob{1, 1}, DrawnJob{2, 1}, DrawnJob{5, 1},
                                           DrawnJob{20, 1}, DrawnJob{1, 60}, DrawnJob{2, 60},
                                           DrawnJob{5, 60}, DrawnJob{20, 60}),
                         [](const auto& one) {
                           return std::to_string(one.param.ranks) + "Ranks" +
                                  std::to_string(one.param.buckets) + "Buckets";
                         });

TEST_P(ReportPage, IsDrawn) {
  MadeJob job;
  job.ranks = GetParam().ranks;
  job.buckets = GetParam().buckets;
  job.steps = 14;
  test::write_timelines(directory(), test::make_timelines(job));
  const std::string html = page();
  expect_well_formed(html);
  EXPECT_EQ(html.find("of 20 ranks are drawn") != std::string::npos, job.ranks == 20);
  EXPECT_EQ(html.find("The 40 of 60 buckets") != std::string::npos, job.buckets == 60);
  EXPECT_THAT(html, Not(HasSubstr("nan")));
}

TEST_F(Report, WritesNotesToThePageAndToStandardError) {
  test::write_timelines(directory(), test::make_timelines(slow_rank()));
  std::filesystem::resize_file(directory() / "rank0.json",
                               std::filesystem::file_size(directory() / "rank0.json") - 9);
  std::ofstream(directory() / "rank2.json") << "<b>";
  auto command = report({directory().string()});
  EXPECT_EQ(command.wait(), 0);
  for (const char* note :
       {"rank0.json is incomplete: its rank was killed, its disk was full, or it is still running",
        "rank2.json: not a timeline; expected a JSON array (at byte 0); it is ignored",
        "there is no timeline of rank 2 (of 3 ranks)"}) {
    EXPECT_THAT(command.err(), HasSubstr(note));
    EXPECT_THAT(read("report.html"), HasSubstr(note));
  }
}

TEST_F(Report, WritesAPageForTooFewSteps) {
  test::write_timelines(directory(), test::make_timelines({.steps = 0}));
  const std::string html = page();
  EXPECT_THAT(html, HasSubstr("Too few steps for a diagnosis"));
  expect_well_formed(html);
}

TEST_F(Report, WritesThePageToOutput) {
  test::write_timelines(directory(), test::make_timelines({}));
  auto command = report({directory().string(), "--output", path("other.html")});
  EXPECT_EQ(command.wait(), 0) << command.err();
  EXPECT_THAT(command.out(), testing::EndsWith(path("other.html") + "\n"));
  EXPECT_FALSE(std::filesystem::exists(directory() / "report.html"));
  EXPECT_THAT(read("other.html"), StartsWith("<!DOCTYPE html>"));

  auto nowhere = report({directory().string(), "--output=/no/such/place.html"});
  EXPECT_EQ(nowhere.wait(), 1);
  EXPECT_THAT(nowhere.out(), StartsWith("All is well: "));
  EXPECT_EQ(nowhere.err(),
            "paceline report: cannot write /no/such/place.html: No such file or directory "
            "(ENOENT)\n");
}

TEST_F(Report, PrintsTheDiagnosisAsJson) {
  test::write_timelines(directory(), test::make_timelines(slow_rank()));
  auto command = report({directory().string(), "--json"});
  EXPECT_EQ(command.wait(), 0);
  EXPECT_EQ(command.err(), "");
  EXPECT_FALSE(std::filesystem::exists(directory() / "report.html"));
  const auto json = nlohmann::json::parse(command.out());
  EXPECT_EQ(json["version"], 1);
  EXPECT_EQ(json["finding"], "straggler");
  EXPECT_EQ(json["rank"], 1);
  EXPECT_EQ(json["sentence"], kSlowRank);
  EXPECT_EQ(json["ranks"], 3);
  EXPECT_EQ(json["steps"], 34);
  EXPECT_NEAR(json["period"], 10000, 1);
  EXPECT_NEAR(json["shares"]["stall"], 0.3, 1e-3);
  EXPECT_NEAR(json["shares"]["between"], 0.1, 1e-3);
  EXPECT_NEAR(json["remedies"][0]["prediction"]["after"], 7000, 1);
  EXPECT_EQ(json["remedies"][0]["prediction"]["if"], "rank 1 were as fast as the others");
  EXPECT_NEAR(json["times"][2]["late"], 3000, 1);
  EXPECT_EQ(json["buckets"].size(), 4U);
  EXPECT_EQ(json["buckets"][0]["bytes"], 1 << 20);
  // The timelines have nothing of the kernel's.
  for (const char* unknown : {"used", "foreign", "elsewhere", "throttled", "preempted", "faults"}) {
    EXPECT_TRUE(json["machine"].at(unknown).is_null()) << unknown;
  }
  for (const char* unknown : {"queued", "queue_gain", "waiting_between", "reading_between"}) {
    EXPECT_TRUE(json["shares"].at(unknown).is_null()) << unknown;
  }
  EXPECT_TRUE(json["times"][0].at("queued").is_null());
  EXPECT_EQ(json["notes"].size(), 0U);

  auto both = report({directory().string(), "--json", "--output", path("other.html")});
  EXPECT_EQ(both.wait(), 0);
  EXPECT_EQ(both.out(), command.out());
  EXPECT_THAT(read("other.html"), StartsWith("<!DOCTYPE html>"));
}

TEST_F(Report, SaysThatItsOutputIsLost) {
  test::write_timelines(directory(), test::make_timelines(slow_rank()));
  for (const char* more : {"", " --json"}) {
    ChildProcess command({"/bin/sh", "-c",
                          std::string(PACELINE_COMMAND) + " report " + directory().string() + more +
                              " > /dev/full"});
    EXPECT_EQ(command.wait(), 1);
    EXPECT_THAT(command.err(), HasSubstr("cannot write to standard output: "));
    EXPECT_THAT(command.err(), HasSubstr("ENOSPC"));
  }
}

// Every value that a file may hold: the document stays JSON.
TEST_F(Report, JsonHoldsHostileNames) {
  auto traces = test::make_timelines({.reduction = 3000});
  for (auto& trace : traces) {
    for (auto& [key, bucket] : trace.buckets) bucket.parameters = "\"}\x01\n\\\xc2\x9b";
  }
  test::write_timelines(directory(), traces);
  auto command = report({directory().string(), "--json"});
  EXPECT_EQ(command.wait(), 0);
  EXPECT_EQ(nlohmann::json::parse(command.out())["buckets"][0]["parameters"],
            "\"}\x01\n\\\xc2\x9b");
  EXPECT_THAT(command.out(), Not(HasSubstr("\xc2\x9b")));  // a terminal would obey it
}

TEST_F(Report, NamesInvalidArguments) {
  const auto expect = [&](std::vector<std::string> arguments, int code, const std::string& text) {
    auto command = report(std::move(arguments));
    EXPECT_EQ(command.wait(), code);
    EXPECT_THAT(command.err(), AllOf(StartsWith("paceline report: "), HasSubstr(text)));
    EXPECT_EQ(command.out(), "");
  };
  expect({}, 2, "DIR is required");
  expect({"a", "b"}, 2, "b");
  expect({path("none")}, 2, "none: No such file or directory");
  expect({directory().string()}, 2, "start the program with PACELINE_TIMELINE=");
  std::ofstream(directory() / "rank0.json") << "{}";
  expect({directory().string()}, 1,
         "rank0.json: not a timeline; expected a JSON array (at byte 0)");

  auto help = report({"--help"});
  EXPECT_EQ(help.wait(), 0);
  EXPECT_THAT(help.out(), HasSubstr("Usage: paceline report DIR [--output FILE] [--json]"));
}

}  // namespace
}  // namespace paceline
