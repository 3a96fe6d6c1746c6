#pragma once

#include <exception>
#include <optional>

namespace paceline::distributed {

// Leaves the main function of a spawned process, from spawn to record. Programs cannot name it, and
// only catch (...) stops it.
struct SpawnedFunctionEnded {};

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
