// The real `paceline` with small shell programs as workers: what becomes of the workers' output.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <utility>

#include "base/pipe.h"
#include "base/unique_fd.h"
#include "launcher.h"
#include "support/rank_here.h"

namespace paceline {
namespace {

using test::eventually;
using test::Launcher;
using test::pid_after;
using test::rank_here;
using ::testing::HasSubstr;
using ::testing::Not;

TEST_F(Launcher, PrefixesOutputAndSeparatesStdoutFromStderr) {
  auto job = run(2, "echo out $RANK of $WORLD_SIZE; echo err >&2; printf unfinished");
  EXPECT_EQ(job.wait(), 0) << job.err();
  for (const char* line : {"[rank0]: out 0 of 2\n", "[rank1]: out 1 of 2\n",
                           "[rank0]: unfinished\n", "[rank1]: unfinished\n"}) {
    EXPECT_THAT(job.out(), HasSubstr(line));
  }
  EXPECT_THAT(job.err(), HasSubstr("[rank0]: err\n"));
  EXPECT_THAT(job.err(), HasSubstr("[rank1]: err\n"));
  EXPECT_THAT(job.out(), Not(HasSubstr("err")));
}

TEST_F(Launcher, LosesNoOutput) {
  auto job = run(2, "seq 1 50000");
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(std::count(job.out().begin(), job.out().end(), '\n'), 100000);
  EXPECT_THAT(job.out(), HasSubstr("[rank1]: 50000\n"));
}

// What a pipe takes that nobody reads.
std::string fill(int write_end) {
  ::fcntl(write_end, F_SETFL, O_NONBLOCK);
  std::string filling;
  while (::write(write_end, "full\n", 5) == 5) filling += "full\n";
  return filling;
}

TEST_F(Launcher, WaitsForASlowReaderOfANonBlockingPipe) {
  auto [reader, writer] = base::make_pipe();
  const std::string filling = fill(writer.get());
  auto job = run(1, "seq 1 30000", {}, {}, {base::UniqueFd(), std::move(writer)});
  std::string text;
  std::array<char, 4096> buffer;
  for (ssize_t size = 0; (size = ::read(reader.get(), buffer.data(), buffer.size())) > 0;) {
    text.append(buffer.data(), static_cast<std::size_t>(size));
  }
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(text.substr(0, filling.size()), filling);
  EXPECT_EQ(
      std::count(text.begin() + static_cast<std::ptrdiff_t>(filling.size()), text.end(), '\n'),
      30000);
}

class UnreadOutput : public Launcher {
 protected:
  // `writer`: of a pipe or a terminal.
  void expect_that_a_signal_ends_the_job(base::UniqueFd writer) {
    fill(writer.get());
    ::fcntl(writer.get(), F_SETFL, 0);
    // The worker is stopped by its full pipe once the launcher no longer reads.
    auto job =
        run(1, "echo worker=$$ >&2; exec yes", {}, {}, {base::UniqueFd(), std::move(writer)});
    job.wait_for("worker=");
    const pid_t worker = pid_after(job.err(), "worker");
    ASSERT_TRUE(eventually([&] { return test::process_state(worker) == 'S'; }));
    job.signal(SIGTERM);
    EXPECT_EQ(job.wait(), 128 + SIGTERM) << job.err();
  }
};

TEST_F(UnreadOutput, OfAPipeLeavesSignalsHandled) {
  auto [reader, writer] = base::make_pipe();
  expect_that_a_signal_ends_the_job(std::move(writer));
}

TEST_F(UnreadOutput, OfATerminalLeavesSignalsHandled) {
  auto terminal = test::open_terminal(72);
  if (!terminal) GTEST_SKIP() << "no terminal: openpty: " << std::strerror(errno);
  expect_that_a_signal_ends_the_job(std::move(terminal->write_end));
}

TEST_F(Launcher, EndsAfterAFailureIfItsOutputIsNotRead) {
  auto [reader, writer] = base::make_pipe();
  fill(writer.get());
  ::fcntl(writer.get(), F_SETFL, 0);
  auto job = run(1, "seq 1 100; exit 3", {}, {}, {base::UniqueFd(), std::move(writer)});
  EXPECT_EQ(job.wait(), 3) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("paceline: " + rank_here(0) + " exited with code 3\n"));
  EXPECT_THAT(job.err(),
              HasSubstr("paceline: standard output was not read for 10 s; the rest is dropped\n"));
}

TEST_F(Launcher, ASignalEndsTheWaitForAReaderAfterASuccess) {
  auto [reader, writer] = base::make_pipe();
  fill(writer.get());
  ::fcntl(writer.get(), F_SETFL, 0);
  auto job = run(1, "echo worker=$$ >&2; seq 1 100", {}, {}, {base::UniqueFd(), std::move(writer)});
  job.wait_for("worker=");
  const pid_t worker = pid_after(job.err(), "worker");
  ASSERT_TRUE(eventually([&] { return test::is_gone(worker); }));
  // Whether the launcher knows of the end by now or not.
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 128 + SIGTERM) << job.err();
}

TEST_F(Launcher, AFullDiskBehindItsOutputDoesNotEndTheJob) {
  base::UniqueFd full(::open("/dev/full", O_WRONLY | O_CLOEXEC));
  auto job = run(2, "echo some output", {}, {}, {base::UniqueFd(), std::move(full)});
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("paceline: 42 bytes of standard output were lost: No space"));
}

class LostReader : public Launcher {
 protected:
  // Both streams of a job end in `out`, whose reader goes; then a signal asks for the end.
  void expect_that_ranks_end_by_themselves(base::Pipe out, int signal) {
    const auto saved = temporary_.path() / "saved";
    const auto ready = temporary_.path() / "ready";
    auto job = run(1,
                   "trap 'echo saving; echo saving >&2; : > $TMPDIR/saved; exit 0' INT HUP; "
                   ": > $TMPDIR/ready; while :; do sleep 0.01; done",
                   {"--stop-grace", "60"}, {}, {base::UniqueFd(), std::move(out.write_end)}, true);
    ASSERT_TRUE(eventually([&] { return std::filesystem::exists(ready); }));
    out.read_end.reset();
    job.signal(signal);
    EXPECT_EQ(job.wait(), 128 + signal);
    EXPECT_TRUE(std::filesystem::remove(saved));
    std::filesystem::remove(ready);
  }
};

// As Ctrl-C ends `paceline run ... 2>&1 | tee log`.
TEST_F(LostReader, OfAPipeLeavesRanksTimeToEnd) {
  expect_that_ranks_end_by_themselves(base::make_pipe(), SIGINT);
}

// As the end of an SSH connection does.
TEST_F(LostReader, OfATerminalLeavesRanksTimeToEnd) {
  auto terminal = test::open_terminal(72);
  if (!terminal) GTEST_SKIP() << "no terminal: openpty: " << std::strerror(errno);
  expect_that_ranks_end_by_themselves(std::move(*terminal), SIGHUP);
}

TEST_F(Launcher, GoesOnWithoutAReaderOfItsOutput) {
  auto [reader, writer] = base::make_pipe();
  reader.reset();
  auto job = run(2, "echo some output; exit $((RANK * 4))", {"--failure-grace", "60"}, {},
                 {base::UniqueFd(), std::move(writer)});
  EXPECT_EQ(job.wait(), 4) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("paceline: 42 bytes of standard output were lost: Broken pipe"));
}

TEST_F(Launcher, GoesOnIfItsOutputReachesTheLimitOfAFile) {
  const auto file = temporary_.path() / "out";
  test::ChildProcess job(
      {"sh", "-c", "ulimit -f 8; exec \"$0\" run sh -c 'seq 1 10000; exit 3' > " + file.string(),
       PACELINE_COMMAND},
      {{"TMPDIR", temporary_.path().string()}});
  EXPECT_EQ(job.wait(), 3) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("bytes of standard output were lost: File too large"));
  std::filesystem::remove(file);
}

// The inodes identify the pipes of rank 0 that lead to the terminal.
TEST_F(Launcher, PassesTheTerminalToRankZero) {
  auto terminal = test::open_terminal(72);
  if (!terminal) GTEST_SKIP() << "no terminal: openpty: " << std::strerror(errno);
  auto job =
      run(2, "cd /proc/$$/fd; echo told=$PACELINE_TERMINAL=$(stat -Lc %i 1),$(stat -Lc %i 2)", {},
          {}, std::move(*terminal), true);
  EXPECT_EQ(job.wait(), 0);
  const std::string& text = job.out();
  const auto begin = text.find("[rank0]: told=") + 14;
  const auto middle = text.find('=', begin);
  ASSERT_NE(middle, text.npos) << text;
  const auto columns = text.find(',', begin);
  EXPECT_EQ(text.substr(begin, columns - begin), "63");
  EXPECT_EQ(text.substr(columns + 1, middle - columns - 1),
            text.substr(middle + 1, text.find_first_of("\r\n", middle) - middle - 1));
  EXPECT_THAT(text, HasSubstr("[rank1]: told=="));
}

}  // namespace
}  // namespace paceline
