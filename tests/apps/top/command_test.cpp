// The real `paceline top` on jobs of rank.cpp.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>

#include "support/child_process.h"
#include "support/eventually.h"
#include "support/temporary_directory.h"
#include "top/find_job.h"

namespace paceline {
namespace {

using test::ChildProcess;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

ChildProcess top(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {PACELINE_COMMAND, "top"});
  return ChildProcess(std::move(arguments));
}

// Two ranks, of which rank 1 is slow. The destructor ends them.
class WatchedRanks {
 public:
  explicit WatchedRanks(const std::string& name, const std::vector<std::string>& flags = {})
      : job_(command_of(name, flags, directory_.path())) {
    job_.wait_for("waits;");
  }
  ~WatchedRanks() {  // NOLINT(bugprone-exception-escape): a test may end by it
    stop();
    job_.wait();
  }
  WatchedRanks(const WatchedRanks&) = delete;
  WatchedRanks& operator=(const WatchedRanks&) = delete;

  void wrap() const { std::ofstream(directory_.path() / "wrap") << ' '; }
  void stop() const {
    wrap();
    std::ofstream(directory_.path() / "stop") << ' ';
  }
  void train() {
    wrap();
    wait_for_step();
  }
  // Until a step has begun and ended that none of the calls before has seen.
  void wait_for_step() {
    for (const int mark : {++marks_, ++marks_}) {
      std::ofstream(directory_.path() / fmt::format("mark{}", mark)) << ' ';
      job_.wait_for(fmt::format("mark{};", mark));
    }
  }
  pid_t launcher() const { return job_.pid(); }
  std::vector<top::LiveProcess> ranks() const {
    return top::ranks_of(*top::find_job({.process = launcher(), .job = {}}));
  }

 private:
  static std::vector<std::string> command_of(const std::string& name,
                                             const std::vector<std::string>& flags,
                                             const std::filesystem::path& directory) {
    std::vector<std::string> command{PACELINE_COMMAND, "run", "--nproc-per-node", "2",
                                     "--rdzv-id",      name};
    command.insert(command.end(), flags.begin(), flags.end());
    command.insert(command.end(), {TOP_RANK, directory.string()});
    return command;
  }

  test::TemporaryDirectory directory_;
  ChildProcess job_;
  int marks_ = 0;
};

std::string unique_name(const char* name) {
  return fmt::format("{}-{}", name, ::getpid());
}

constexpr const char* kRankOneIsSlow = "Rank 1 holds this run back: it computes ";

// What it prints. Again and again: a busy machine may hold the run back more than rank 1 does.
std::string top_until(const std::vector<std::string>& arguments,
                      const std::function<bool(const std::string& text)>& condition) {
  std::string text;
  EXPECT_TRUE(test::eventually([&] {
    auto command = top(arguments);
    EXPECT_EQ(command.wait(), 0) << command.err();
    EXPECT_EQ(command.err(), "");
    text = command.out();
    return condition(text);
  })) << text;
  return text;
}

TEST(Top, NamesTheSlowRankOfTheLaunchersJob) {
  WatchedRanks job(unique_name("slow"));
  job.train();
  const std::string out =
      top_until({std::to_string(job.launcher()), "--once"},
                [](const std::string& text) { return text.find(kRankOneIsSlow) != text.npos; });
  EXPECT_THAT(out, AllOf(StartsWith("job " + unique_name("slow") + ": 2 ranks, step "),
                         ContainsRegex("steps/s, [0-9.]+ samples/s\n"), HasSubstr(kRankOneIsSlow),
                         HasSubstr("rank 1, bucket 0"), Not(HasSubstr("\x1b"))));
}

TEST(Top, FindsTheJobOfARankAndOfAName) {
  WatchedRanks job(unique_name("named"));
  job.train();
  const pid_t rank = job.ranks().at(1).pid;
  for (const auto& target : {std::vector<std::string>{std::to_string(rank)},
                             std::vector<std::string>{"--job", unique_name("named")}}) {
    auto arguments = target;
    arguments.insert(arguments.end(), {"--once", "--json"});
    const auto json = nlohmann::json::parse(top_until(arguments, [](const std::string& text) {
      return nlohmann::json::parse(text)["finding"] == "straggler";
    }));
    EXPECT_EQ(json["version"], 1);
    EXPECT_EQ(json["rank"], 1);
    EXPECT_EQ(json["ranks"], 2);
    EXPECT_EQ(json["times"].size(), 2U);
    EXPECT_EQ(json["buckets"][0]["parameters"], "linear.bias, linear.weight");
    EXPECT_EQ(json["notes"].size(), 0U);
  }
}

TEST(Top, ListsJobsIfThereAreSeveral) {
  WatchedRanks one(unique_name("one"));
  WatchedRanks two(unique_name("two"));
  one.train();
  two.train();
  auto command = top({});
  EXPECT_EQ(command.wait(), 2);
  EXPECT_THAT(command.err(),
              AllOf(ContainsRegex("[0-9]+ jobs train; name one by a process or by --job:\n"),
                    HasSubstr("  --job " + unique_name("one") + ": process "),
                    HasSubstr("  --job " + unique_name("two") + ": process ")));
  auto here = top({std::to_string(::getpid()), "--once"});
  EXPECT_EQ(here.wait(), 2);
  EXPECT_THAT(here.err(), HasSubstr("2 jobs were started by this process; name one by a process:"));
}

TEST(Top, RefreshesUntilTheJobEnds) {
  WatchedRanks job(unique_name("ends"));
  job.train();
  auto command = top({std::to_string(job.launcher()), "--interval", "0.1"});
  command.wait_for(kRankOneIsSlow);
  command.wait_for("\n\njob " + unique_name("ends"));
  job.stop();
  EXPECT_EQ(command.wait(), 0);
  EXPECT_EQ(command.err(), "paceline top: the job has ended\n");
}

TEST(Top, GoesOnIfTheLauncherStartsTheRanksAgain) {
  WatchedRanks job(unique_name("restarts"), {"--max-restarts", "1"});
  job.train();
  auto command = top({std::to_string(job.launcher()), "--interval", "0.1"});
  command.wait_for(kRankOneIsSlow);
  const pid_t first = job.ranks().at(0).pid;
  ::kill(first, SIGKILL);
  std::vector<top::LiveProcess> again;
  EXPECT_TRUE(test::eventually([&] {
    const auto key = top::find_job({.process = job.launcher(), .job = {}});
    if (key) again = top::ranks_of(*key);
    return again.size() == 2 && again[0].pid != first;
  }));
  // They record only for who watches.
  EXPECT_TRUE(test::eventually([&] { return !again.at(0).reader->read().spans.empty(); }));
  job.stop();
  EXPECT_EQ(command.wait(), 0);
  EXPECT_EQ(command.err(), "paceline top: the job has ended\n");
}

TEST(Top, WaitsForAModel) {
  WatchedRanks job(unique_name("waits"));
  auto command = top({std::to_string(job.launcher()), "--once"});
  auto other = top({"--job", unique_name("waits"), "--once"});
  command.wait_for("paceline top: waiting for a DistributedDataParallel\n");
  other.wait_for("paceline top: waiting for a DistributedDataParallel\n");
  job.train();
  EXPECT_EQ(command.wait(), 0);
  EXPECT_THAT(command.out(), HasSubstr(kRankOneIsSlow));
  EXPECT_EQ(other.wait(), 0);
  EXPECT_THAT(other.out(), HasSubstr(kRankOneIsSlow));
}

TEST(Top, SaysThatTheJobEndedBeforeAJudgement) {
  WatchedRanks job(unique_name("short"));
  job.train();
  auto command = top({std::to_string(job.launcher()), "--once", "--interval", "3600"});
  // Its lease shows that it is there.
  const auto ranks = job.ranks();
  while (ranks[0].reader->read().spans.empty()) job.wait_for_step();
  job.stop();
  EXPECT_EQ(command.wait(), 1);
  EXPECT_EQ(command.err(), "paceline top: the job has ended\n");
}

TEST(Top, KilledViewerLeavesNoRecording) {
  WatchedRanks job(unique_name("killed"));
  job.train();
  const auto ranks = job.ranks();
  const auto records = [&] { return !ranks[0].reader->read().spans.empty(); };
  job.wait_for_step();
  EXPECT_FALSE(records());
  {
    auto command = top({std::to_string(job.launcher())});
    command.wait_for(kRankOneIsSlow);
    EXPECT_TRUE(records());
    command.signal(SIGKILL);
    EXPECT_EQ(command.wait(), 128 + SIGKILL);
  }
  do {
    records();
    job.wait_for_step();
  } while (records());
  job.wait_for_step();
  EXPECT_FALSE(records());
}

TEST(Top, RedrawsOnATerminalAndShowsTheCursorAgain) {
  auto terminal = test::open_terminal(60);
  if (!terminal) GTEST_SKIP() << "there are no terminals here";
  WatchedRanks job(unique_name("terminal"));
  job.train();
  ChildProcess command({PACELINE_COMMAND, "top", std::to_string(job.launcher()), "--interval=0.1"},
                       {}, std::move(*terminal));
  command.wait_for("\x1b[?25l");
  command.wait_for("Ajob ");  // up, and over the old text
  command.signal(SIGINT);
  EXPECT_EQ(command.wait(), 128 + SIGINT);
  EXPECT_THAT(command.out(), ::testing::EndsWith("\x1b[?25h"));
}

TEST(Top, NamesInvalidTargets) {
  const auto expect = [](std::vector<std::string> arguments, int code, const std::string& text) {
    auto command = top(std::move(arguments));
    EXPECT_EQ(command.wait(), code);
    EXPECT_THAT(command.err(), AllOf(StartsWith("paceline top: "), HasSubstr(text)));
    EXPECT_THAT(command.out(), IsEmpty());
  };
  ChildProcess shell({"/bin/sh", "-c", "echo ready; read line"});
  shell.wait_for("ready");
  const std::string bystander = std::to_string(shell.pid());
  expect({bystander}, 2, "process " + bystander + " (sh) does not train");
  expect({"4194305"}, 2, "there is no process 4194305");
  expect({"-1"}, 2, "PID=-1 is not an integer of at least 1");
  expect({"one"}, 2, "PID=one is not an integer");
  expect({"1", "--job", "a"}, 2, "name a process or a job, not both");
  expect({"--job", "no-such-job"}, 2, "no job on this machine has the name no-such-job");
  expect({"--json"}, 2, "--json needs --once");
  expect({"--interval", "0"}, 2, "--interval 0: expected at least 0.1 seconds");
  expect({"--interval", "x"}, 2, "--interval x: expected 0 to 31536000 seconds");
  auto help = top({"--help"});
  EXPECT_EQ(help.wait(), 0);
  EXPECT_THAT(help.out(), HasSubstr("Usage: paceline top [PID] [flags]"));
}

// As another user than root, init's; as root, as another user, ours.
TEST(Top, NamesTheUserWhoMayLook) {
  namespace fs = std::filesystem;
  const test::TemporaryDirectory directory;
  fs::permissions(directory.path(), fs::perms::others_all, fs::perm_options::add);
  const fs::path copy = directory.path() / "paceline";
  fs::copy_file(PACELINE_COMMAND, copy);
  std::vector<std::string> arguments{copy.string(), "top", "1"};
  if (::geteuid() == 0) {
    arguments.back() = std::to_string(::getpid());
    arguments.insert(arguments.begin(), {"setpriv", "--reuid=65534", "--clear-groups"});
  }
  ChildProcess command(arguments);
  EXPECT_EQ(command.wait(), 1);
  EXPECT_THAT(command.err(), HasSubstr(": Permission denied; only that user and root may"));
}

}  // namespace
}  // namespace paceline
