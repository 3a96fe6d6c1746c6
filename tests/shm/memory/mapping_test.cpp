#include "shm/memory/mapping.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include <paceline/error.h>

namespace paceline::shm {
namespace {

constexpr std::size_t kRegionSize = std::size_t{64} << 20;

// The flags of a mapping in /proc/self/smaps, each after a space; empty if the system has none.
std::string flags_of(const std::byte* begin) {
  std::ifstream file("/proc/self/smaps");
  const std::string head = fmt::format("{:x}-", reinterpret_cast<std::uintptr_t>(begin));
  const std::string label = "VmFlags:";
  bool found = false;
  for (std::string line; std::getline(file, line);) {
    found = found || line.starts_with(head);
    if (found && line.starts_with(label)) return line.substr(label.size());
  }
  return "";
}

// A dump would allocate every page.
TEST(Mapping, IsNotPartOfACoreDump) {
  const Mapping mapping(Mapping::create_memory(kRegionSize));
  const std::string flags = flags_of(mapping.data());
  if (flags.empty()) GTEST_SKIP() << "no flags in /proc/self/smaps";
  EXPECT_NE(flags.find(" dd"), std::string::npos) << flags;
}

// Whether `holds` is true in a forked child.
bool holds_in_child(const std::function<bool()>& holds) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(holds() ? 0 : 1);
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return status == 0;
}

TEST(Mapping, IsNotAllocatedInAProcessThatLocksItsMemory) {
  const base::UniqueFd memory = Mapping::create_memory(kRegionSize);
  const auto kilobytes = [&] {
    struct stat status {};
    EXPECT_EQ(::fstat(memory.get(), &status), 0);
    return status.st_blocks / 2;
  };
  constexpr int kNotAllowed = 2;
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      if (::mlockall(MCL_FUTURE) != 0) ::_exit(kNotAllowed);
      const Mapping mapping(base::UniqueFd(::dup(memory.get())));
      mapping.data()[0] = std::byte{1};
      ::_exit(0);
    } catch (const Error&) {  // ulimit -l allows less
      ::_exit(kNotAllowed);
    }
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  if (WEXITSTATUS(status) == kNotAllowed) GTEST_SKIP() << "not allowed to lock memory";
  EXPECT_EQ(status, 0);
  EXPECT_LE(kilobytes(), 64);
}

TEST(Mapping, WhatAForkedChildWritesIsItsOwn) {
  const Mapping mapping(Mapping::create_memory(kRegionSize));
  std::byte* const data = mapping.data();
  data[0] = std::byte{1};
  EXPECT_TRUE(holds_in_child([&] {
    const bool sees_the_parents = data[0] == std::byte{1} && data[kRegionSize - 1] == std::byte{0};
    data[0] = data[kRegionSize - 1] = std::byte{2};
    return sees_the_parents && data[0] == std::byte{2};
  }));
  EXPECT_EQ(data[0], std::byte{1});
  EXPECT_EQ(data[kRegionSize - 1], std::byte{0});
}

TEST(Mapping, AChildOfAForkedChildHasWhatThatHasWritten) {
  const Mapping mapping(Mapping::create_memory(kRegionSize));
  std::byte* const data = mapping.data();
  EXPECT_TRUE(holds_in_child([&] {
    data[0] = std::byte{1};
    const bool inherited = holds_in_child([&] {
      const bool same = data[0] == std::byte{1};
      data[0] = std::byte{2};
      return same;
    });
    return inherited && data[0] == std::byte{1};
  }));
  EXPECT_EQ(data[0], std::byte{0});
}

TEST(Mapping, IsNotPartOfAForkedChildsCoreDump) {
  const Mapping mapping(Mapping::create_memory(kRegionSize));
  if (flags_of(mapping.data()).empty()) GTEST_SKIP() << "no flags in /proc/self/smaps";
  EXPECT_TRUE(
      holds_in_child([&] { return flags_of(mapping.data()).find(" dd") != std::string::npos; }));
}

TEST(Mapping, MayBeMadeAndEndWhileAnotherThreadForks) {
  const Mapping mapping(Mapping::create_memory(kRegionSize));
  std::atomic<bool> over = false;
  std::thread other([&] {
    while (!over) {
      const Mapping first(Mapping::create_memory(kRegionSize));
      const Mapping second(Mapping::create_memory(2 * kRegionSize));
      first.data()[0] = second.data()[2 * kRegionSize - 1] = std::byte{1};
    }
  });
  for (int i = 0; i < 50; ++i) {
    EXPECT_TRUE(holds_in_child([&] {
      mapping.data()[0] = std::byte{2};
      return true;
    }));
    EXPECT_EQ(mapping.data()[0], std::byte{0});
  }
  over = true;
  other.join();
}

}  // namespace
}  // namespace paceline::shm
