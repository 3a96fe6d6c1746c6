#include "shm/memory/mapping.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <string>

namespace paceline::shm {
namespace {

constexpr std::size_t kSize = std::size_t{64} << 20;

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
  const Mapping mapping(Mapping::create_memory(kSize));
  const std::string flags = flags_of(mapping.data());
  if (flags.empty()) GTEST_SKIP() << "no flags in /proc/self/smaps";
  EXPECT_NE(flags.find(" dd"), std::string::npos) << flags;
}

}  // namespace
}  // namespace paceline::shm
