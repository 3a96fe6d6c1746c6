// The real `paceline` with small shell programs as workers: no process of a job outlives it.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/pipe.h"
#include "launcher.h"
#include "support/refuse_call.h"
#include "support/temporary_directory.h"

namespace paceline {
namespace {

namespace fs = std::filesystem;
using test::ChildProcess;
using test::eventually;
using test::guard_of;
using test::has_ended;
using test::is_gone;
using test::Launcher;
using test::pid_after;
using test::pids_after;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// A worker with a child in its group and one that has left for its own session, both up when the
// worker goes on.
constexpr const char* kFamily = R"(
  sleep 1000 & echo child=$!
  setsid sh -c 'echo escaped=$$; : > $TMPDIR/up$RANK; exec sleep 1000' &
  until [ -e $TMPDIR/up$RANK ]; do :; done
  rm $TMPDIR/up$RANK
  echo supervisor=$PPID; echo worker=$$
)";

void wait_for_families(ChildProcess& job, int ranks) {
  for (int rank = 0; rank < ranks; ++rank) {
    for (const char* label : {"child=", "escaped=", "worker="}) {
      job.wait_for("[rank" + std::to_string(rank) + "]: " + label);
    }
  }
}

void expect_all_gone(const ChildProcess& job) {
  for (const char* label : {"child", "escaped", "worker"}) {
    const auto pids = pids_after(job.out(), label);
    EXPECT_THAT(pids, Not(IsEmpty())) << label;
    for (const pid_t pid : pids) EXPECT_TRUE(eventually([&] { return is_gone(pid); })) << label;
  }
  // Without its launcher it is a zombie until the machine's first process comes round to it.
  const pid_t supervisor = pids_after(job.out(), "supervisor").at(0);
  EXPECT_TRUE(eventually([&] { return has_ended(supervisor); }));
}

TEST_F(Launcher, KilledLauncherLeavesNoProcess) {
  auto job = run(2, std::string(kFamily) + "wait");
  wait_for_families(job, 2);
  job.signal(SIGKILL);
  EXPECT_EQ(job.wait(), 128 + SIGKILL) << job.err();
  expect_all_gone(job);
}

TEST_F(Launcher, KilledSupervisorLeavesNoWorker) {
  auto job = run(2, std::string(kFamily) + "wait");
  wait_for_families(job, 2);
  ::kill(pids_after(job.out(), "supervisor").front(), SIGKILL);
  EXPECT_EQ(job.wait(), 1) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("supervisor process was killed"));
  expect_all_gone(job);
}

// The launcher may signal the supervisor, whose number must not be another process's by then.
TEST_F(Launcher, KilledSupervisorIsReapedAfterTheLastSignalToIt) {
  auto job = run(2, std::string(kFamily) + "wait");
  wait_for_families(job, 2);
  const pid_t supervisor = pids_after(job.out(), "supervisor").front();
  job.signal(SIGSTOP);
  ASSERT_TRUE(eventually([&] { return test::process_state(job.pid()) == 'T'; }));
  ::kill(supervisor, SIGKILL);
  for (const char* label : {"child", "escaped", "worker"}) {
    for (const pid_t pid : pids_after(job.out(), label)) {
      EXPECT_TRUE(eventually([&] { return is_gone(pid); })) << label;
    }
  }
  EXPECT_EQ(test::process_state(supervisor), 'Z');
  job.signal(SIGCONT);
  EXPECT_EQ(job.wait(), 1) << job.err();
  EXPECT_TRUE(eventually([&] { return is_gone(supervisor); }));
}

TEST_F(Launcher, LeavesNoProcessIfAnyTwoOfItsThreeAreKilled) {
  for (const char* spared : {"guard", "supervisor", "launcher"}) {
    SCOPED_TRACE(std::string("all but the ") + spared);
    auto job = run(2, std::string(kFamily) + "wait");
    wait_for_families(job, 2);
    std::map<std::string, pid_t> pids{{"launcher", job.pid()},
                                      {"guard", guard_of(job)},
                                      {"supervisor", pids_after(job.out(), "supervisor").at(0)}};
    ASSERT_NE(pids["launcher"], pids["guard"]);
    const pid_t left = pids.extract(spared).mapped();
    // None of them may see another's end before its own.
    for (const auto& process : pids) {
      ::kill(process.second, SIGSTOP);
      ASSERT_TRUE(eventually([&] { return test::process_state(process.second) == 'T'; }));
    }
    for (const auto& process : pids) ::kill(process.second, SIGKILL);
    EXPECT_NE(job.wait(), 0) << job.err();
    expect_all_gone(job);
    EXPECT_TRUE(eventually([&] { return has_ended(left); }));
    EXPECT_THAT(left_behind(), IsEmpty());
  }
}

TEST_F(Launcher, JobGoesOnWithoutItsGuard) {
  auto job =
      run(1, "echo supervisor=$PPID; until [ -e $TMPDIR/go ]; do :; done; rm $TMPDIR/go; exit 3");
  job.wait_for("supervisor=");
  ::kill(guard_of(job), SIGKILL);
  const std::ofstream go(temporary_.path() / "go");
  EXPECT_EQ(job.wait(), 3) << job.err();
}

// What killall, pkill and pkill -f look at.
TEST_F(Launcher, OnlyTheLauncherIsNamedPaceline) {
  auto job = run(1, "echo supervisor=$PPID; exec sleep 1000");
  job.wait_for("supervisor=");
  for (const pid_t pid : {guard_of(job), pid_after(job.out(), "supervisor")}) {
    for (const char* file : {"comm", "cmdline"}) {
      std::ifstream stream("/proc/" + std::to_string(pid) + "/" + file);
      const std::string name(std::istreambuf_iterator<char>(stream), {});
      EXPECT_THAT(name, HasSubstr("job-")) << file;
      EXPECT_THAT(name, Not(HasSubstr("paceline"))) << file;
    }
  }
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 128 + SIGTERM) << job.err();
}

TEST_F(Launcher, EndsDetachedProcessesOfWorkers) {
  auto job = run(2, std::string(kFamily) + "exit 0");
  EXPECT_EQ(job.wait(), 0) << job.err();
  expect_all_gone(job);
}

TEST_F(Launcher, FailureEndsDescendantsOfWorkers) {
  auto job = run(2, std::string(kFamily) + R"(
    if [ $RANK = 1 ]; then
      until [ -e $TMPDIR/trapped ]; do :; done
      rm $TMPDIR/trapped
      exit 9
    fi
    trap '' TERM
    : > $TMPDIR/trapped
    wait; wait; wait)",
                 {"--stop-grace", "0.2"});
  EXPECT_EQ(job.wait(), 9) << job.err();
  expect_all_gone(job);
}

std::vector<pid_t> children_of(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{0}/task/{0}/children", pid));
  return {std::istream_iterator<pid_t>(file), {}};
}

bool handles(pid_t pid, int signal) {
  std::ifstream file(fmt::format("/proc/{}/status", pid));
  for (std::string word; file >> word;) {
    std::uint64_t mask = 0;
    if (word == "SigCgt:" && file >> std::hex >> mask) return (mask >> (signal - 1) & 1) != 0;
  }
  return false;
}

// Once the program is ready; 0 if there are no PID namespaces here.
pid_t process_1_of(ChildProcess& job) {
  try {
    job.wait_for("ready");
  } catch (const std::runtime_error&) {
    return 0;
  }
  return children_of(job.pid()).at(0);
}

// As `docker exec` starts processes beside the job, whose orphans process 1 adopts.
TEST_F(Launcher, LeavesNoZombiesAsProcess1) {
  ChildProcess job({"unshare", "--pid", "--fork", "--kill-child", "--mount-proc", PACELINE_COMMAND,
                    "run", "sh", "-c", "echo ready; exec sleep 1000"});
  const pid_t launcher = process_1_of(job);
  if (launcher == 0) GTEST_SKIP() << "no PID namespaces: " << job.err();
  const auto before = children_of(launcher);
  ChildProcess beside({"nsenter", "--target", std::to_string(launcher), "--pid", "--mount", "sh",
                       "-c", "sleep 0.1 > /dev/null 2>&1 & exit 0"});
  EXPECT_EQ(beside.wait(), 0) << beside.err();
  EXPECT_TRUE(eventually([&] { return children_of(launcher) == before; }));
}

// SIGTERM, but not SIGINT, which its parent left ignored.
TEST_F(Launcher, EndsByASignalAsProcess1WhileNobodyReadsItsOutput) {
  auto [reader, writer] = base::make_pipe();
  ChildProcess job({"unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c",
                    std::string("trap '' INT; exec ") + PACELINE_COMMAND +
                        " run sh -c 'seq 1 12000; echo ready >&2'"},
                   {}, {base::UniqueFd(), std::move(writer)});
  const pid_t launcher = process_1_of(job);
  if (launcher == 0) GTEST_SKIP() << "no PID namespaces: " << job.err();
  ASSERT_TRUE(eventually([&] { return handles(launcher, SIGTERM); }));
  EXPECT_FALSE(handles(launcher, SIGINT));
  ::kill(launcher, SIGTERM);
  EXPECT_EQ(job.wait(), 128 + SIGTERM) << job.err();
}

// As sudo does, this starts processes of root for a launcher that is another user's. Only that
// user's group may execute the program which allows it.
class LauncherOfAnotherUser : public Launcher {
 protected:
  static constexpr unsigned kUser = 65534;

  void SetUp() override {
    const fs::path original = "/usr/bin/setpriv";
    if (::geteuid() != 0 || !fs::exists(original)) GTEST_SKIP() << "needs root, and setpriv";
    ::chmod(programs_.path().c_str(), 0711);
    fs::copy_file(original, as_root_);
    ASSERT_EQ(::chown(as_root_.c_str(), 0, kUser), 0);
    ::chmod(as_root_.c_str(), 04750);
    ASSERT_EQ(::chown(temporary_.path().c_str(), kUser, kUser), 0);
    if (run_as_user({"sh", "-c", sudo() + "true && " PACELINE_COMMAND " --version"}).wait() != 0) {
      GTEST_SKIP() << "another user cannot become root, or cannot run paceline";
    }
  }
  ChildProcess run_as_user(const std::vector<std::string>& command) const {
    const std::string user = std::to_string(kUser);
    std::vector<std::string> whole{"setpriv", "--reuid=" + user, "--regid=" + user,
                                   "--clear-groups"};
    whole.insert(whole.end(), command.begin(), command.end());
    return ChildProcess(whole, {{"TMPDIR", temporary_.path().string()}});
  }
  ChildProcess run_script(int ranks, const std::string& script) const {
    return run_as_user({PACELINE_COMMAND, "run", "--nproc-per-node", std::to_string(ranks),
                        "--stop-grace=0.1", "sh", "-c", script});
  }
  std::string sudo() const { return as_root_.string() + " --reuid=0 "; }
  // And ends the process.
  static void expect_named(const ChildProcess& job) {
    const pid_t foreign = pid_after(job.out(), "foreign");
    EXPECT_THAT(job.err(),
                HasSubstr(fmt::format("a process of this job, {}, is another user's", foreign)));
    ::kill(foreign, SIGKILL);
  }

 private:
  const test::TemporaryDirectory programs_;
  const fs::path as_root_ = programs_.path() / "setpriv";
};

TEST_F(LauncherOfAnotherUser, DoesNotWaitForWhatItMayNotEnd) {
  const std::string start = sudo() +
                            "sleep 1000 & echo foreign=$!; "
                            "until grep -q '^Uid:.0.0' /proc/$!/status; do :; done; exit ";
  for (const int code : {0, 3}) {
    auto job = run_script(1, start + std::to_string(code));
    EXPECT_EQ(job.wait(), code) << job.err();
    expect_named(job);
  }
}

TEST_F(LauncherOfAnotherUser, ReportsTheFailureOfAnotherRank) {
  const std::string up = (temporary_.path() / "up").string();
  auto job = run_script(
      2, fmt::format("if [ $RANK = 1 ]; then exec {0} sh -c 'echo foreign=$$; : > {1}; exec sleep "
                     "1000'; fi; until [ -e {1} ]; do :; done; rm -f {1}; exit 3",
                     sudo(), up));
  EXPECT_EQ(job.wait(), 3) << job.err();
  EXPECT_THAT(job.err(), HasSubstr("failed first: exited with code 3"));
  expect_named(job);
}

TEST_F(LauncherOfAnotherUser, EndsByASignal) {
  auto job = run_script(1, "exec " + sudo() + "sh -c 'echo foreign=$$; exec sleep 1000'");
  job.wait_for("foreign=");
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 128 + SIGTERM) << job.err();
  expect_named(job);
}

// A kernel before 5.3 lacks both calls, and one before 5.9 the second.
class LauncherWithout : public Launcher,
                        public ::testing::WithParamInterface<std::vector<unsigned>> {};
INSTANTIATE_TEST_SUITE_P(, LauncherWithout,
                         ::testing::Values(std::vector<unsigned>{SYS_pidfd_open},
                                           std::vector<unsigned>{SYS_close_range},
                                           std::vector<unsigned>{SYS_pidfd_open, SYS_close_range}));

TEST_P(LauncherWithout, EndsWhatItStarted) {
  std::unique_ptr<ChildProcess> failing;
  std::unique_ptr<ChildProcess> killed;
  bool refused = false;
  std::thread([&] {
    refused = std::ranges::all_of(GetParam(), test::refuse_call);
    failing.reset(new ChildProcess(run(3, "test $RANK = 1 && exit 7; exec sleep 1000")));
    killed.reset(new ChildProcess(run(2, std::string(kFamily) + "wait")));
  }).join();
  if (!refused) GTEST_SKIP() << "no seccomp filters here";
  EXPECT_EQ(failing->wait(), 7) << failing->err();
  wait_for_families(*killed, 2);
  killed->signal(SIGKILL);
  EXPECT_EQ(killed->wait(), 128 + SIGKILL);
  expect_all_gone(*killed);
}

}  // namespace
}  // namespace paceline
