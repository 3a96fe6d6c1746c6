#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

#include "base/cgroup.h"

namespace paceline::doctor {

// In bytes.
struct MemoryFacts {
  std::uint64_t total = 0;
  std::uint64_t available = 0;  // without swapping, on the machine
  std::uint64_t swap_total = 0;
  std::uint64_t swap_free = 0;
  std::optional<std::uint64_t> limit{};  // the control group's with the least left, if any
  std::uint64_t used_of_limit = 0;       // without files that can be dropped
  std::uint64_t mapped = 0;              // address space of this process, LibTorch included
  std::uint64_t region = 0;              // address space that a group of ranks shares
};

// From a directory in the format of /proc, and the process's control group. `ranks`: of the region.
MemoryFacts read_memory(int ranks, const std::filesystem::path& proc = "/proc",
                        const base::Cgroup& cgroup = base::find_cgroup("memory"));

}  // namespace paceline::doctor
