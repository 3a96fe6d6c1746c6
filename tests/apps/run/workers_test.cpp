// The real `paceline` with small shell programs as workers: what the workers start with.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <sstream>

#include "base/unique_fd.h"
#include "launcher.h"

namespace paceline {
namespace {

using test::Launcher;
using test::pids_after;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

TEST_F(Launcher, SetsAndLogsOmpNumThreadsUnlessTheUserDid) {
  auto chosen = run(2, "echo threads=$OMP_NUM_THREADS", {}, {{"OMP_NUM_THREADS", ""}});
  EXPECT_EQ(chosen.wait(), 0);
  const auto threads = pids_after(chosen.out(), "threads");
  ASSERT_EQ(threads.size(), 2U);
  EXPECT_THAT(chosen.err(), HasSubstr("paceline: 2 processes, " + std::to_string(threads[0]) +
                                      (threads[0] == 1 ? " thread each (" : " threads each (")));
  auto given = run(1, "echo threads=$OMP_NUM_THREADS", {}, {{"OMP_NUM_THREADS", "7"}});
  EXPECT_EQ(given.wait(), 0);
  EXPECT_EQ(given.out(), "[rank0]: threads=7\n");
  EXPECT_THAT(given.err(), HasSubstr("OMP_NUM_THREADS=7"));
}

TEST_F(Launcher, FixesWhatResultsDependOnUnlessTheUserDid) {
  const std::string show =
      "echo $OMP_NUM_THREADS $MKL_CBWR $ATEN_CPU_CAPABILITY $ONEDNN_MAX_CPU_ISA";
  const Environment unset{{"OMP_NUM_THREADS", ""},
                          {"MKL_CBWR", ""},
                          {"ATEN_CPU_CAPABILITY", ""},
                          {"ONEDNN_MAX_CPU_ISA", ""}};
  auto free = run(1, show, {}, unset);
  EXPECT_EQ(free.wait(), 0);
  EXPECT_THAT(free.err(), Not(HasSubstr("deterministic")));
  auto fixed = run(1, show, {"--deterministic"}, unset);
  EXPECT_EQ(fixed.wait(), 0);
  EXPECT_EQ(fixed.out(), "[rank0]: 1 AVX2,STRICT avx2 AVX2\n");
  EXPECT_THAT(fixed.err(), HasSubstr("1 thread each"));
  EXPECT_THAT(fixed.err(), HasSubstr("), deterministic\n"));
  auto chosen = run(1, show, {"--deterministic"},
                    {{"OMP_NUM_THREADS", "2"},
                     {"MKL_CBWR", "COMPATIBLE"},
                     {"ATEN_CPU_CAPABILITY", "default"},
                     {"ONEDNN_MAX_CPU_ISA", "SSE41"}});
  EXPECT_EQ(chosen.wait(), 0);
  EXPECT_EQ(chosen.out(), "[rank0]: 2 COMPATIBLE default SSE41\n");
}

TEST_F(Launcher, TunesMallocUnlessTheUserConfiguresIt) {
  const std::string show = "echo $MALLOC_MMAP_THRESHOLD_,$MALLOC_TRIM_THRESHOLD_";
  auto tuned = run(1, show);
  EXPECT_EQ(tuned.wait(), 0);
  EXPECT_EQ(tuned.out(), "[rank0]: 1073741824,2147483647\n");
  auto off = run(1, show, {"--no-tune-malloc"});
  EXPECT_EQ(off.wait(), 0);
  EXPECT_EQ(off.out(), "[rank0]: ,\n");
  auto chosen = run(1, show, {}, {{"MALLOC_TRIM_THRESHOLD_", "5"}});
  EXPECT_EQ(chosen.wait(), 0);
  EXPECT_EQ(chosen.out(), "[rank0]: ,5\n");
}

TEST_F(Launcher, AsGlooReachesProgramsThatDoNotImportThePackage) {
  const std::string show = "echo $PACELINE_AS_GLOO.";
  auto off = run(1, show);
  EXPECT_EQ(off.wait(), 0);
  EXPECT_EQ(off.out(), "[rank0]: .\n");
  auto on = run(1, show, {"--as-gloo"});
  EXPECT_EQ(on.wait(), 0);
  EXPECT_EQ(on.out(), "[rank0]: 1.\n");
}

// In the session of the user's terminal, a worker that opens /dev/tty would be stopped.
TEST_F(Launcher, EachWorkerLeadsItsOwnSession) {
  auto job = run(1,
                 "read -r _ _ _ _ group session _ < /proc/$$/stat; "
                 "echo $((group - $$)) $((session - $$))");
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(job.out(), "[rank0]: 0 0\n");
}

// The launcher itself survives SIGPIPE and SIGXFSZ.
TEST_F(Launcher, WorkersIgnoreTheSignalsThatTheLauncherWasStartedToIgnore) {
  for (const char* const trap : {"", "trap '' PIPE; ", "trap '' PIPE XFSZ USR2; "}) {
    constexpr const char* kShow = "grep SigIgn /proc/self/status";
    test::ChildProcess job(
        {"sh", "-c", fmt::format("{0}{1}; exec \"$0\" run {1}", trap, kShow), PACELINE_COMMAND},
        {{"TMPDIR", temporary_.path().string()}});
    EXPECT_EQ(job.wait(), 0) << job.err();
    const std::string& text = job.out();
    const std::string own = text.substr(0, text.find('\n') + 1);
    EXPECT_EQ(text, fmt::format("{0}[rank0]: {0}", own));
  }
}

// The lines of one rank, without their prefix.
std::vector<std::string> lines_of(const std::string& text, int rank) {
  std::vector<std::string> lines;
  const std::string prefix = "[rank" + std::to_string(rank) + "]: ";
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    if (line.rfind(prefix, 0) == 0) lines.push_back(line.substr(prefix.size()));
  }
  return lines;
}

TEST_F(Launcher, WorkersInheritOnlyTheirOwnDescriptors) {
  const base::UniqueFd stray(::dup(STDERR_FILENO));  // the launcher inherits it, its workers do not
  auto job = run(3,
                 "echo 0 1 2 $PACELINE_BOOTSTRAP_SOCKETS $PACELINE_STORE_FD $PACELINE_ERROR_FD | "
                 "tr ', ' '\n\n' | sort;"
                 "echo are; ls /proc/$$/fd; echo open; readlink /proc/$$/fd/*; exit 0");
  EXPECT_EQ(job.wait(), 0) << job.err();
  for (const int rank : {0, 1, 2}) {
    const auto lines = lines_of(job.out(), rank);
    const auto are = std::find(lines.begin(), lines.end(), "are");
    const auto open = std::find(lines.begin(), lines.end(), "open");
    ASSERT_NE(open, lines.end()) << job.out();
    EXPECT_EQ(std::vector(lines.begin(), are), std::vector(are + 1, open));
    EXPECT_EQ(std::distance(lines.begin(), are), rank == 0 ? 7 : 6);
    const auto sockets = std::count_if(open, lines.end(), [](const std::string& target) {
      return target.rfind("socket:", 0) == 0;
    });
    EXPECT_EQ(sockets, rank == 0 ? 2 : 1);
    EXPECT_THAT(lines, Contains(HasSubstr("memfd:paceline-store")));
    EXPECT_THAT(lines, Contains(HasSubstr("memfd:paceline-error")));
  }
}

}  // namespace
}  // namespace paceline
