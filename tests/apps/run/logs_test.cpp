// The real `paceline` with small shell programs as workers: files with their output.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "base/pipe.h"
#include "base/unique_fd.h"
#include "launcher.h"
#include "support/rank_here.h"

namespace paceline {
namespace {

namespace fs = std::filesystem;
using test::ChildProcess;
using test::eventually;
using test::Launcher;
using test::pid_after;
using test::rank_here;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;

std::string content(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

class Logs : public Launcher {
 protected:
  ChildProcess run_logged(int ranks, const std::string& script, std::vector<std::string> flags) {
    flags.insert(flags.begin(), {"--log-dir", logs_.path().string(), "--rdzv-id", "job"});
    return run(ranks, script, std::move(flags));
  }
  // The directories of the runs so far.
  std::vector<fs::path> runs() const {
    return {fs::directory_iterator(logs_.path()), fs::directory_iterator()};
  }
  // Of the only run.
  fs::path attempt(int number = 0) const {
    return runs().at(0) / ("attempt_" + std::to_string(number));
  }
  // Relative to the only run.
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::recursive_directory_iterator(runs().at(0))) {
      if (!entry.is_directory()) names.push_back(fs::relative(entry.path(), runs()[0]).string());
    }
    return names;
  }

  const test::TemporaryDirectory logs_;
};

constexpr const char* kBoth = "echo out $RANK; echo err $RANK >&2";

TEST_F(Logs, RedirectedStreamsGoToFilesOnly) {
  auto job = run_logged(2, kBoth, {"-r", "0:1,1:3"});
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(job.out(), "");
  EXPECT_THAT(job.err(), HasSubstr("[rank0]: err 0\n"));
  EXPECT_THAT(job.err(), Not(HasSubstr("err 1")));
  ASSERT_THAT(runs(), SizeIs(1));
  EXPECT_THAT(runs()[0].filename().string(), StartsWith("job_"));
  EXPECT_THAT(job.err(), HasSubstr("paceline: logs in " + runs()[0].string() + "\n"));
  EXPECT_THAT(files(), UnorderedElementsAre("attempt_0/0/stdout.log", "attempt_0/1/stdout.log",
                                            "attempt_0/1/stderr.log"));
  EXPECT_EQ(content(attempt() / "0/stdout.log"), "out 0\n");
  EXPECT_EQ(content(attempt() / "1/stdout.log"), "out 1\n");
  EXPECT_EQ(content(attempt() / "1/stderr.log"), "err 1\n");
}

TEST_F(Logs, TeedStreamsGoToFilesAndTheConsole) {
  auto job = run_logged(2, kBoth, {"--tee=1", "--redirects=3", "--local_ranks_filter=0"});
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(job.out(), "[rank0]: out 0\n") << "rank 1 is filtered from the console only";
  EXPECT_THAT(job.err(), Not(HasSubstr("err ")));
  EXPECT_EQ(content(attempt() / "0/stdout.log"), "out 0\n");
  EXPECT_EQ(content(attempt() / "1/stdout.log"), "out 1\n");
  EXPECT_EQ(content(attempt() / "1/stderr.log"), "err 1\n");
}

TEST_F(Logs, TheConsoleFollowsATeedFileWhileTheRankRuns) {
  auto job = run_logged(1, "echo worker=$$; exec sleep 1000", {"-t1"});
  job.wait_for("worker=");
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 128 + SIGTERM);
}

TEST_F(Logs, ATeedStreamLosesNothing) {
  auto job = run_logged(2, "seq 1 50000", {"-t", "1"});
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(std::count(job.out().begin(), job.out().end(), '\n'), 100000);
  EXPECT_THAT(job.out(), HasSubstr("[rank1]: 50000\n"));
}

// Nothing is read until the worker has ended, whose output does not stop it.
TEST_F(Logs, ASlowReaderGetsAllOfATeedStream) {
  for (const bool is_read : {true, false}) {
    auto [reader, writer] = base::make_pipe();
    auto job = run(1, "echo worker=$$ >&2; exec seq 1 3000000",
                   {"--log-dir", logs_.path().string(), "-t", "1"}, {},
                   {base::UniqueFd(), std::move(writer)});
    job.wait_for("worker=");
    const pid_t worker = pid_after(job.err(), "worker");
    ASSERT_TRUE(eventually([&] { return test::is_gone(worker); }));
    if (!is_read) job.signal(SIGTERM);
    if (is_read) {
      EXPECT_EQ(test::read_lines(reader.get()), 3000000);
    }
    EXPECT_EQ(job.wait(), is_read ? 0 : 128 + SIGTERM) << job.err();
  }
}

TEST_F(Logs, AnErrorOfTheLauncherComesAfterTheOutput) {
  const std::vector<std::string> through_files{"--log-dir", logs_.path().string(),        "-t",
                                               "1",         "--duplicate-stdout-filters", "99999"};
  for (const auto& flags : {std::vector<std::string>(), through_files}) {
    auto [reader, writer] = base::make_pipe();
    const int lines = flags.empty() ? 12000 : 100000;  // more than a pipe, or one read, takes
    const std::string script = fmt::format(
        "{}echo supervisor=$PPID >&2; echo worker=$$ >&2; seq 1 {}; : > $TMPDIR/written; "
        "exec sleep 1000",
        test::kNameGuard, lines);
    auto job = run(1, script, flags, {}, {base::UniqueFd(), std::move(writer)});
    job.wait_for("worker=");
    ASSERT_TRUE(eventually([&] { return fs::exists(temporary_.path() / "written"); }));
    ::kill(pid_after(job.err(), "supervisor"), SIGKILL);
    // With files, the launcher keeps the guard until they are read.
    const pid_t last = pid_after(job.err(), flags.empty() ? "guard" : "worker");
    ASSERT_TRUE(eventually([&] { return test::is_gone(last); }));
    EXPECT_EQ(test::read_lines(reader.get()), lines);
    EXPECT_EQ(job.wait(), 1);
    EXPECT_THAT(job.err(), HasSubstr("supervisor process was killed"));
    fs::remove(temporary_.path() / "written");
  }
  EXPECT_EQ(content(attempt() / "filtered_stdout.log"), "[rank0]: 99999\n");
}

TEST_F(Logs, ADirectoryAloneKeepsTheErrorFiles) {
  auto job = run_logged(1,
                        "echo out; printf '{\"message\": \"broken disk\"}' > "
                        "$TORCHELASTIC_ERROR_FILE; exit $((3 - TORCHELASTIC_RESTART_COUNT))",
                        {"--max-restarts", "1"});
  EXPECT_EQ(job.wait(), 2);
  EXPECT_EQ(job.out(), "[rank0]: out\n[rank0]: out\n");
  EXPECT_THAT(job.err(), HasSubstr("error: broken disk"));
  EXPECT_THAT(files(), UnorderedElementsAre("attempt_0/0/error.json", "attempt_1/0/error.json"));
  EXPECT_EQ(content(attempt(1) / "0/error.json"), "{\"message\": \"broken disk\"}");
}

TEST_F(Logs, EachRunHasADirectoryOfItsOwn) {
  for (int round = 0; round < 2; ++round) {
    auto job = run_logged(1, "echo out", {"-r", "1"});
    EXPECT_EQ(job.wait(), 0) << job.err();
  }
  EXPECT_THAT(runs(), SizeIs(2));
}

TEST_F(Logs, AreInTheirDirectoryWhateverTheJobIsCalled) {
  for (const char* const id : {"/a/b", "../up"}) {
    auto job = run_logged(1, "echo out", {"-r", "1", "--rdzv-id", id});
    EXPECT_EQ(job.wait(), 0) << job.err();
  }
  EXPECT_THAT(runs(), SizeIs(2));
}

TEST_F(Logs, TheReportHasTheLastLinesOfRedirectedStreams) {
  auto job = run_logged(1, "seq 1 30000; echo why >&2; exit 3", {"-r", "3"});
  EXPECT_EQ(job.wait(), 3);
  EXPECT_THAT(job.err(), HasSubstr("paceline: " + rank_here(0) +
                                   " exited with code 3\n  last lines of rank 0:\n"
                                   "    | 29982\n"));
  EXPECT_THAT(job.err(), HasSubstr("    | 30000\n    | why\n"));
  auto teed = run_logged(1, "echo first; exit 3", {"-t", "3"});
  EXPECT_EQ(teed.wait(), 3);
  EXPECT_THAT(teed.err(), HasSubstr("  last lines of rank 0:\n    | first\n"));
}

// The launcher reads nothing after SIGSTOP, and gets SIGKILL when the worker has written all.
TEST_F(Logs, LoseNothingWhenTheLauncherIsKilled) {
  for (const char* const flag : {"-r", "-t"}) {
    const test::TemporaryDirectory marks;
    const std::string go = (marks.path() / "go").string();
    const std::string done = (marks.path() / "done").string();
    const std::string script = fmt::format(
        "echo worker=$$ >&2; until [ -e {} ]; do sleep 0.01; done; seq 1 30000; echo > {}; "
        "exec sleep 1000",
        go, done);
    auto job = run_logged(1, script, {flag, "1"});
    job.wait_for("worker=");
    const pid_t worker = pid_after(job.err(), "worker");
    job.signal(SIGSTOP);
    ASSERT_TRUE(eventually([&] { return test::process_state(job.pid()) == 'T'; }));
    std::ofstream(go) << "now";
    ASSERT_TRUE(eventually([&] { return fs::exists(done); }));
    job.signal(SIGKILL);
    EXPECT_EQ(job.wait(), 128 + SIGKILL);
    EXPECT_TRUE(eventually([&] { return test::is_gone(worker); }));
    const std::string text = content(attempt() / "0/stdout.log");
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 30000) << flag;
    fs::remove_all(runs()[0]);
  }
}

TEST_F(Logs, LinesOfTeedStreamsAreFiltered) {
  auto job = run_logged(2, "echo one, $RANK; echo two $RANK; echo three; echo two >&2",
                        {"-t", "0:3,1:1", "--duplicate-stdout-filters", "one,,,two"});
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(files(),
              UnorderedElementsAre("attempt_0/0/stdout.log", "attempt_0/0/stderr.log",
                                   "attempt_0/1/stdout.log", "attempt_0/filtered_stdout.log"));
  const std::string text = content(attempt() / "filtered_stdout.log");
  for (const char* const line :
       {"[rank0]: one, 0\n", "[rank0]: two 0\n", "[rank1]: one, 1\n", "[rank1]: two 1\n"}) {
    EXPECT_THAT(text, HasSubstr(line));
  }
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 4) << text;
  fs::remove_all(runs()[0]);
  // As torchrun has it: an empty text is in every line, and only what is teed is filtered.
  auto all = run_logged(1, "echo out; echo err >&2",
                        {"-t", "2", "--duplicate_stderr_filters=", "--duplicate-stdout-filters="});
  EXPECT_EQ(all.wait(), 0) << all.err();
  EXPECT_EQ(content(attempt() / "filtered_stderr.log"), "[rank0]: err\n");
  EXPECT_EQ(content(attempt() / "filtered_stdout.log"), "");
}

TEST_F(Logs, WithoutADirectoryTheyAreInANewOneThatStays) {
  const test::TemporaryDirectory temporary;
  const Environment environment{{"TMPDIR", temporary.path().string()}, {"PET_REDIRECTS", "1"}};
  ChildProcess job({PACELINE_COMMAND, "run", "--log-dir=", "--rdzv-id=job", "echo", "hello"},
                   environment);
  EXPECT_EQ(job.wait(), 0) << job.err();
  const fs::path left = *fs::directory_iterator(temporary.path());
  EXPECT_THAT(left.filename().string(), StartsWith("paceline-logs-job_"));
  EXPECT_EQ(content(left / "attempt_0/0/stdout.log"), "hello\n");
  fs::remove_all(left);
  ChildProcess none({PACELINE_COMMAND, "run", "--log-dir=/dev/null", "echo", "hello"}, environment);
  EXPECT_EQ(none.wait(), 0) << none.err();
  EXPECT_EQ(none.out(), "[rank0]: hello\n");
  EXPECT_TRUE(eventually([&] { return fs::is_empty(temporary.path()); }));
}

TEST_F(Logs, ADirectoryThatCannotBeMadeIsOneSentence) {
  std::ofstream(logs_.path() / "file") << "no directory";
  const std::string path = (logs_.path() / "file").string();
  auto job = run(1, "true", {"--log-dir", path});
  EXPECT_EQ(job.wait(), 1);
  EXPECT_EQ(job.err(), "paceline run: cannot make the directory " + path +
                           ": Not a directory (ENOTDIR); give --log-dir a directory that can be "
                           "written\n");
  EXPECT_EQ(job.out(), "");
}

TEST_F(Logs, AFullDiskIsOneSentence) {
  const std::string path = logs_.path().string();
  const std::string mount = "mount -t tmpfs -o size=64k none " + path;
  ChildProcess probe({"unshare", "-Urm", "sh", "-c", mount});
  if (probe.wait() != 0) GTEST_SKIP() << "no file system can be mounted: " << probe.err();
  const std::string paceline = std::string(PACELINE_COMMAND) + " run -r 1 --log-dir " + path;
  ChildProcess job({"unshare", "-Urm", "sh", "-c",
                    mount + "; " + paceline + " sh -c 'head -c 200000 /dev/zero; exit 3'"});
  EXPECT_EQ(job.wait(), 3) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("paceline: cannot write logs in " + path));
  EXPECT_THAT(job.err(), HasSubstr(": No space left on device (ENOSPC); output of this job may be "
                                   "missing there\n"));
  ChildProcess second({"unshare", "-Urm", "sh", "-c",
                       mount + "; head -c 200000 /dev/zero > " + path + "/fill 2> /dev/null; " +
                           paceline + " echo started; ls " + path});
  EXPECT_EQ(second.wait(), 0);
  EXPECT_THAT(second.err(), StartsWith("paceline run: cannot write logs in " + path));
  EXPECT_EQ(second.out(), "fill\n") << "nothing was started, and nothing is left";
}

// Nobody, not even root, can make a directory in /proc.
TEST_F(Launcher, KeepsErrorsInMemoryIfThereIsNoPlaceForFiles) {
  const auto start = [](std::vector<std::string> flags, const std::string& script) {
    std::vector<std::string> command{PACELINE_COMMAND, "run", "--nproc-per-node", "2"};
    command.insert(command.end(), flags.begin(), flags.end());
    command.insert(command.end(), {"sh", "-c", script});
    return ChildProcess(command, {{"TMPDIR", "/proc/self"}});
  };
  auto job = start({},
                   "[ $RANK = 0 ] || { printf '{\"message\": \"the reason\"}' > "
                   "$TORCHELASTIC_ERROR_FILE; exit 5; }; exec sleep 1000");
  EXPECT_EQ(job.wait(), 5) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("paceline: cannot make the directory /proc/self/paceline-"));
  EXPECT_THAT(job.err(), HasSubstr("; the errors of ranks are kept in memory (TMPDIR names a "
                                   "directory for them)\n"));
  EXPECT_THAT(job.err(), HasSubstr(" failed first: exited with code 5\n  error: the reason\n"));
  auto logs = start({"-r", "1"}, "echo started");
  EXPECT_EQ(logs.wait(), 1);
  EXPECT_THAT(logs.err(), HasSubstr("; give --log-dir a directory that can be written\n"));
  EXPECT_EQ(logs.out(), "");
}

// Each line is seen before the next one truncates the file.
TEST_F(Logs, AreFollowedAfterTheyWereTruncated) {
  const auto go = logs_.path() / "go";
  auto job = run(1,
                 "echo a long first line; until [ -e " + go.string() +
                     " ]; do sleep 0.01; done; echo second > /dev/stdout",
                 {"--log-dir", logs_.path().string(), "-t", "1"});
  job.wait_for("[rank0]: a long first line\n");
  std::ofstream(go).close();
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(job.out(), "[rank0]: a long first line\n[rank0]: second\n");
}

TEST_F(Logs, AreNotToldToARankAsATerminal) {
  auto terminal = test::open_terminal(72);
  if (!terminal) GTEST_SKIP() << "no terminal";
  auto job = run(1, "echo told=$PACELINE_TERMINAL.$(stat -Lc %i /proc/$$/fd/2)",
                 {"--log-dir", logs_.path().string(), "-t", "1"}, {}, std::move(*terminal), true);
  EXPECT_EQ(job.wait(), 0);
  // Its stderr is a pipe to the terminal, its stdout a file.
  const std::string text = content(attempt() / "0/stdout.log");
  const std::string inode = text.substr(text.find('.') + 1);
  EXPECT_EQ(text, "told=63," + inode.substr(0, inode.size() - 1) + "." + inode);
}

}  // namespace
}  // namespace paceline
