#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <optional>
#include <string>

#include <paceline/tune_malloc.h>

#include "base/cores.h"
#include "base/deadline.h"
#include "base/environment.h"
#include "base/errno_error.h"
#include "base/log.h"
#include "base/parse.h"
#include "base/unique_fd.h"
#include "support/temporary_directory.h"
#include "support/thoroughness.h"

namespace paceline::base {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

Environment parse(const std::map<std::string, std::string>& variables) {
  return parse_environment([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

std::string parse_failure(const std::map<std::string, std::string>& variables) {
  try {
    parse(variables);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Environment, IsReadAgainOnRequest) {
  const Environment& before = environment();
  const std::optional<int> count = before.restart_count;
  ASSERT_EQ(::setenv("TORCHELASTIC_RESTART_COUNT", "7", 1), 0);
  EXPECT_NE(environment().restart_count, 7);
  EXPECT_EQ(refresh_environment().restart_count, 7);
  EXPECT_EQ(&environment(), &refresh_environment());
  EXPECT_EQ(before.restart_count, count);
  ::unsetenv("TORCHELASTIC_RESTART_COUNT");
  refresh_environment();
}

TEST(Environment, TreatsEmptyVariablesAsUnset) {
  const Environment environment = parse({{"RANK", ""}});
  EXPECT_FALSE(environment.rank);
  EXPECT_FALSE(environment.world_size);
  EXPECT_FALSE(environment.use_agent_store);
  EXPECT_TRUE(environment.bootstrap_sockets.empty());
}

TEST(Environment, ReadsTorchrunsVariables) {
  const Environment environment = parse({{"RANK", "3"},
                                         {"WORLD_SIZE", "4"},
                                         {"LOCAL_RANK", "1"},
                                         {"LOCAL_WORLD_SIZE", "2"},
                                         {"GROUP_RANK", "1"},
                                         {"MASTER_ADDR", "127.0.0.1"},
                                         {"MASTER_PORT", "29500"},
                                         {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                         {"TORCHELASTIC_RUN_ID", "job 7"},
                                         {"PACELINE_BOOTSTRAP_SOCKETS", "7,8,21"},
                                         {"PACELINE_STORE_FD", "9"},
                                         {"PACELINE_MAX_REPLACEMENTS", "3"},
                                         {"PACELINE_TERMINAL", "80,4000000000,7"},
                                         {"PACELINE_SPAWN", "3,4711"},
                                         {"PACELINE_ERROR_FD", "12"},
                                         {"PACELINE_DATA", "/data"}});
  EXPECT_EQ(environment.run_id, "job 7");
  EXPECT_EQ(environment.rank, 3);
  EXPECT_EQ(environment.world_size, 4);
  EXPECT_EQ(environment.local_rank, 1);
  EXPECT_EQ(environment.local_world_size, 2);
  EXPECT_EQ(environment.node_rank, 1);
  EXPECT_EQ(environment.master_addr, "127.0.0.1");
  EXPECT_EQ(environment.master_port, 29500);
  EXPECT_TRUE(environment.use_agent_store);
  EXPECT_THAT(environment.bootstrap_sockets, ElementsAre(7, 8, 21));
  EXPECT_EQ(environment.store_fd, 9);
  EXPECT_EQ(environment.max_replacements, 3);
  ASSERT_TRUE(environment.terminal);
  EXPECT_EQ(environment.terminal->columns, 80);
  EXPECT_THAT(environment.terminal->pipes, ElementsAre(4000000000, 7));
  ASSERT_TRUE(environment.spawned);
  EXPECT_EQ(environment.spawned->call, 3);
  EXPECT_EQ(environment.spawned->parent, 4711);
  EXPECT_EQ(environment.error_fd, 12);
  EXPECT_EQ(environment.data_root, "/data");
}

TEST(Environment, NamesTheVariableOfAnInvalidValue) {
  EXPECT_EQ(parse_failure({{"RANK", "-1"}}), "RANK=-1 is not an integer of at least 0");
  EXPECT_EQ(parse_failure({{"WORLD_SIZE", "two"}}),
            "WORLD_SIZE=two is not an integer of at least 1");
  EXPECT_EQ(parse_failure({{"MASTER_PORT", "65536"}}),
            "MASTER_PORT=65536 is not an integer from 0 to 65535");
  EXPECT_EQ(parse_failure({{"RANK", "4"}, {"WORLD_SIZE", "4"}}),
            "RANK=4 is not less than WORLD_SIZE=4");
  EXPECT_EQ(parse_failure({{"RANK", "99999999999"}}),
            "RANK=99999999999 is not an integer of at least 0");
  for (const char* links : {"1,", ",", "1,,2", "x", "1;2", "-1", "1,2147483648"}) {
    EXPECT_THAT(parse_failure({{"PACELINE_BOOTSTRAP_SOCKETS", links}}),
                HasSubstr("PACELINE_BOOTSTRAP_SOCKETS="))
        << links;
  }
  for (const char* call : {"1", "1,2,3", "1,", "x,2", "1,2147483648"}) {
    EXPECT_THAT(parse_failure({{"PACELINE_SPAWN", call}}), HasSubstr("PACELINE_SPAWN")) << call;
  }
}

TEST(Deadline, ClampsNegativeAndHugeBudgets) {
  EXPECT_TRUE(Deadline::after(0ms).expired());
  EXPECT_EQ(Deadline::after(0ms).remaining(), 0ms);
  EXPECT_TRUE(Deadline::after(std::chrono::milliseconds::min()).expired());
  const Deadline never = Deadline::after(std::chrono::milliseconds::max());
  EXPECT_FALSE(never.expired());
  EXPECT_GT(never.remaining(), std::chrono::hours(24 * 365));
}

TEST(UniqueFd, MovesOwnershipAndCloses) {
  UniqueFd first(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const int fd = first.get();
  UniqueFd second(std::move(first));
  EXPECT_EQ(second.get(), fd);
  EXPECT_NE(::fcntl(fd, F_GETFD), -1);
  second.reset();
  EXPECT_EQ(::fcntl(fd, F_GETFD), -1);
}

TEST(ErrnoError, ContainsTheSystemsTextAndName) {
  EXPECT_STREQ(errno_error("cannot open x", ENOENT).what(),
               "cannot open x: No such file or directory (ENOENT)");
  EXPECT_STREQ(errno_error("odd", 9999).what(), "odd: unknown error (9999)");
}

TEST(Log, CallsTheCallbackIfOneIsSet) {
  std::vector<std::string> seen;
  log(LogLevel::info, "without a callback {}", 1);
  set_log_callback([&](LogLevel, std::string_view message) { seen.emplace_back(message); });
  log(LogLevel::warning, "rank {} of {}", 1, 2);
  set_log_callback({});
  log(LogLevel::error, "without a callback again");
  EXPECT_THAT(seen, ElementsAre("rank 1 of 2"));
}

class CgroupCores : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directories(root_ / "a/b"); }
  void write(const std::string& file, const std::string& text) {
    std::ofstream(root_ / file) << text;
  }
  const test::TemporaryDirectory directory_;
  const std::filesystem::path root_ = directory_.path();
};

TEST_F(CgroupCores, TakesTheSmallestQuotaOnThePath) {
  EXPECT_EQ(cgroup_cores(root_, root_ / "a/b"), 0);
  write("a/b/cpu.max", "max 100000\n");
  EXPECT_EQ(cgroup_cores(root_, root_ / "a/b"), 0);
  write("a/cpu.max", "150000 100000\n");
  EXPECT_EQ(cgroup_cores(root_, root_ / "a/b"), 2);
  write("cpu.max", "50000 100000\n");
  EXPECT_EQ(cgroup_cores(root_, root_ / "a/b"), 1);
  write("cpu.max", "nonsense");
  EXPECT_EQ(cgroup_cores(root_, root_ / "a/b"), 2);
}

TEST_F(CgroupCores, ReadsVersionOne) {
  write("a/cpu.cfs_quota_us", "300000\n");
  write("a/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cgroup_cores(root_, root_ / "a/b"), 3);
  write("a/cpu.cfs_quota_us", "-1\n");
  EXPECT_EQ(cgroup_cores(root_, root_ / "a/b"), 0);
}

TEST_F(CgroupCores, TakesTheGroupThatIsThrottledMostOftenMeanwhile) {
  const auto read = [&] { return cgroup_throttling(root_, root_ / "a/b"); };
  EXPECT_EQ(most_throttled(read(), read()).throttled, -1);
  write("a/b/cpu.stat", "usage_usec 9\nnr_periods 8\nnr_throttled 3\nthrottled_usec 700\n");
  // Was stopped long before.
  write("a/cpu.stat", "nr_periods 5000\nnr_throttled 4000\nthrottled_time 900000\n");
  write("cpu.stat", "nonsense");
  const auto before = read();
  EXPECT_EQ(most_throttled(before, before).throttled, 0);
  write("a/b/cpu.stat", "nr_periods 18\nnr_throttled 9\n");
  write("a/cpu.stat", "nr_periods 5010\nnr_throttled 4001\n");
  EXPECT_EQ(most_throttled(before, read()).throttled, 6);
  EXPECT_EQ(most_throttled(before, read()).periods, 10);
}

TEST(Cores, TakesTheLargestCacheAsTheLastLevel) {
  const test::TemporaryDirectory directory;
  EXPECT_EQ(last_level_cache(directory.path()), 0u);
  for (const auto& [index, size] : {std::pair{"index0", "32K"}, {"index1", "32768K"}}) {
    std::filesystem::create_directories(directory.path() / "cache" / index);
    std::ofstream(directory.path() / "cache" / index / "size") << size << '\n';
  }
  EXPECT_EQ(last_level_cache(directory.path()), std::size_t{32} << 20);
}

TEST(Cores, AreAtLeastOne) {
  EXPECT_GE(available_cores(), 1);
}

TEST(Cores, OfAProcessAreKnownByItsNumber) {
  EXPECT_EQ(affinity(::getpid()), affinity());
  EXPECT_EQ(available_cores(::getpid()), available_cores());
  EXPECT_EQ(throttling(::getpid()).size(), throttling().size());
  EXPECT_TRUE(affinity(std::numeric_limits<pid_t>::max()).empty());
}

// The number of page faults while the process uses `bytes` bytes.
long faults_of_using(std::size_t bytes) {
  const auto faults = [] {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_minflt;
  };
  const long before = faults();
  void* const memory = std::malloc(bytes);
  std::memset(memory, 1, bytes);
  asm volatile("" : : "r"(memory) : "memory");  // else the compiler omits all of it
  std::free(memory);
  return faults() - before;
}

TEST(Parse, CutsAtCommas) {
  EXPECT_THAT(split_at_commas("a,,b c,"), ElementsAre("a", "", "b c", ""));
  EXPECT_THAT(split_at_commas("a"), ElementsAre("a"));
  EXPECT_THAT(split_at_commas(""), ElementsAre(""));
}

TEST(Parse, TakesWholeNumbersWithinTheirLimits) {
  EXPECT_EQ(parse_number("7", 0, 7), 7);
  EXPECT_EQ(parse_number("0.5", 0.0, 1.0), 0.5);
  for (const char* const text : {"", "8", "-1", "7 ", " 7", "7x", "0x7", "+7", "99999999999"}) {
    EXPECT_EQ(parse_number(text, 0, 7), std::nullopt) << text;
  }
  EXPECT_EQ(parse_number("nan", 0.0, 1.0), std::nullopt);
  EXPECT_EQ(parse_integer("N", "-3", -5), -3);
  const auto refusal = [](auto&& parse) -> std::string {
    try {
      parse();
    } catch (const UsageError& error) {
      return error.what();
    }
    return "none";
  };
  EXPECT_EQ(refusal([] { parse_integer("--n", "", 1, 9); }), "--n= is not an integer from 1 to 9");
  EXPECT_EQ(refusal([] { parse_integer("N", "0", 1); }), "N=0 is not an integer of at least 1");
}

TEST(TuneMalloc, KeepsLargeBlocksForTheNextUse) {
  const pid_t child = fork();  // tune_malloc cannot be undone
  if (child == 0) {
    constexpr std::size_t kBytes = std::size_t{100} << 20;
    constexpr int kSkipped = 77;
    faults_of_using(kBytes);
    if (faults_of_using(kBytes) < 100) _exit(2);
    if (!tune_malloc()) _exit(kSkipped);
    faults_of_using(kBytes);
    _exit(faults_of_using(kBytes) < 100 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  if (test::kSanitized) GTEST_SKIP() << "the sanitizer replaces malloc";
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace paceline::base
