// What `paceline doctor` reads, from made files and from this machine.
#include <gmock/gmock.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "facts/kernel.h"
#include "facts/memory.h"
#include "facts/network.h"
#include "facts/variables.h"
#include "facts/versions.h"
#include "support/temporary_directory.h"

namespace paceline::doctor {
namespace {

using ::testing::IsEmpty;
using ::testing::Not;

constexpr std::uint64_t kMebibyte = std::uint64_t{1} << 20;

class ReadMemory : public ::testing::Test {
 protected:
  void write(const std::string& file, const std::string& text) {
    const auto path = directory_.path() / file;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  MemoryFacts read() const {
    const auto root = directory_.path();
    return read_memory(2, root / "proc", {root / "cg", root / "cg/a/b"});
  }
  void SetUp() override {
    write("proc/meminfo",
          "MemTotal:       4096 kB\nMemFree:         100 kB\nMemAvailable:   2048 kB\n"
          "HugePages_Total:       0\nSwapTotal:      1024 kB\nSwapFree:        512 kB\n");
    write("cg/a/b/x", "");
  }
  const test::TemporaryDirectory directory_;
};

TEST_F(ReadMemory, ReadsTheMachine) {
  const MemoryFacts facts = read();
  EXPECT_EQ(facts.total, 4 * kMebibyte);
  EXPECT_EQ(facts.available, 2 * kMebibyte);
  EXPECT_EQ(facts.swap_total, kMebibyte);
  EXPECT_EQ(facts.swap_free, kMebibyte / 2);
  EXPECT_FALSE(facts.limit);
}

TEST_F(ReadMemory, TakesTheGroupOnThePathWithTheLeastLeft) {
  write("cg/a/b/memory.max", "max\n");
  write("cg/a/memory.max", "3145728\n");
  write("cg/a/memory.current", "2097152\n");
  write("cg/a/memory.stat", "anon 9\ninactive_file 1048576\nactive_file 4\n");
  EXPECT_EQ(read().limit, 3 * kMebibyte);
  EXPECT_EQ(read().used_of_limit, kMebibyte);
  write("cg/memory.max", "1048576\n");
  EXPECT_EQ(read().limit, kMebibyte);
  EXPECT_EQ(read().used_of_limit, 0u);
  // Other groups in it may have used up a larger limit.
  write("cg/a/memory.current", "4194304\n");
  EXPECT_EQ(read().limit, 3 * kMebibyte);
}

TEST_F(ReadMemory, ReadsVersionOneWhoseLimitMayBeMeaningless) {
  write("cg/a/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_FALSE(read().limit);
  write("cg/a/memory.limit_in_bytes", "2097152\n");
  write("cg/a/memory.usage_in_bytes", "1048576\n");
  EXPECT_EQ(read().limit, 2 * kMebibyte);
  EXPECT_EQ(read().used_of_limit, kMebibyte);
}

TEST(FoundBy, FollowsTheOrderOfTheLoader) {
  const test::TemporaryDirectory directory;
  const auto& root = directory.path();
  for (const char* const one : {"a", "b", "c"}) std::filesystem::create_directory(root / one);
  const auto library = root / "a/lib.so";
  std::ofstream(library) << "";
  const std::string a = root / "a";
  const std::string b = root / "b";
  EXPECT_EQ(found_by(library, {"", "", {root / "b", root / "b/../a"}}), "RUNPATH");
  EXPECT_EQ(found_by(library, {"", b + "::" + a + "/", {root / "a"}}), "LD_LIBRARY_PATH");
  EXPECT_EQ(found_by(library, {"/no " + library.string(), a, {root / "a"}}), "LD_PRELOAD");
  EXPECT_EQ(found_by(library, {"", b, {root / "c", root / "missing"}}), "the system's directories");
}

TEST(ReadVariables, TakesThoseThatCount) {
  const VariableFacts facts = read_variables({{"HOME", "/root"},
                                              {"OMP_NUM_THREADS", "2"},
                                              {"PACELINE_DATA", "/data"},
                                              {"PET_NNODES", ""},
                                              {"SLURM_JOB_NAME", "x"},
                                              {"SLURM_STEP_ID", "0"}},
                                             [](const base::Environment&) {});
  EXPECT_EQ(
      facts.set,
      (Variables{{"OMP_NUM_THREADS", "2"}, {"PACELINE_DATA", "/data"}, {"SLURM_STEP_ID", "0"}}));
  EXPECT_EQ(facts.environment->data_root, "/data");
  const VariableFacts secret =
      read_variables({{"PACELINE_SECRET", "0123456789abcdef"}}, [](const base::Environment&) {});
  EXPECT_EQ(secret.set, (Variables{{"PACELINE_SECRET", "(set)"}}));
  EXPECT_THAT(facts.error, IsEmpty());
}

TEST(ReadVersions, FindsLoadedLibrariesAndNoOthers) {
  EXPECT_TRUE(std::filesystem::exists(path_of_loaded("libc.so.6")));
  EXPECT_EQ(path_of_loaded("libnosuch.so.1"), "");
}

TEST(Resolve, GivesNumericAddressesAndReasons) {
  using namespace std::chrono_literals;
  EXPECT_THAT(resolve("127.0.1.1", 60s).addresses, ::testing::ElementsAre("127.0.1.1"));
  const Resolution none = resolve("no such name", 60s);
  EXPECT_THAT(none.addresses, IsEmpty());
  EXPECT_THAT(none.failure, Not(IsEmpty()));
}

// Everything that Paceline's own tests need works where they pass.
TEST(ProbeKernel, FindsThatItWorksHere) {
  const KernelFacts facts = probe_kernel();
  EXPECT_EQ(facts.sealed_memfd, "");
  EXPECT_EQ(facts.futex, "");
  EXPECT_EQ(facts.subreaper, "");
  EXPECT_EQ(facts.proc, "");
  EXPECT_EQ(facts.temporary_files, "");
}

TEST(ProbeKernel, NamesADirectoryThatCannotBeWritten) {
  const char* const before = std::getenv("TMPDIR");
  const std::string kept = before != nullptr ? before : "";
  ::setenv("TMPDIR", "/proc/self", 1);  // a directory, also for root
  const KernelFacts facts = probe_kernel();
  if (before != nullptr) {
    ::setenv("TMPDIR", kept.c_str(), 1);
  } else {
    ::unsetenv("TMPDIR");
  }
  EXPECT_THAT(facts.temporary_files, ::testing::HasSubstr("cannot create /proc/self/paceline-"));
}

}  // namespace
}  // namespace paceline::doctor
