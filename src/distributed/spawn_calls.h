#pragma once

#include <unistd.h>

#include <exception>
#include <filesystem>
#include <optional>

#include "base/environment.h"
#include "launch/error_file.h"

namespace paceline::distributed {

// Leaves the main function of a spawned process, from spawn to record. Programs cannot name it, and
// only catch (...) stops it.
struct SpawnedFunctionEnded {};

// How spawn has started this process; null if it has not.
inline const base::Environment::Spawned* spawned_process() {
  const auto& spawned = base::environment().spawned;
  return spawned && spawned->parent == ::getppid() ? &*spawned : nullptr;
}

// Where this process's launcher or spawn reads its error.
inline std::optional<std::filesystem::path> error_file() {
  const auto& environment = base::environment();
  if (spawned_process() == nullptr) return environment.error_file;
  const int fd = environment.error_fd.value_or(-1);
  return launch::is_error_memory(fd) ? std::optional(launch::error_memory_path(fd)) : std::nullopt;
}

// This process's calls of spawn. Belongs to the thread of record.
struct SpawnCalls {
  static SpawnCalls& instance() {
    static SpawnCalls calls;
    return calls;
  }

  int count = 0;
  // In a process that spawn started:
  bool called_function = false;
  bool function_returned = false;  // so a World that is left by SpawnedFunctionEnded is left well
  std::exception_ptr failure{};    // what it threw instead, for record
  std::optional<int> exit_code{};  // of the record in which it was called
};

}  // namespace paceline::distributed
